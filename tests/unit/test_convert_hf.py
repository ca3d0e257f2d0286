"""Reading and writing checkpoint folders: fused experts, shards, and every kind of damage with the message a user reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.convert.families import family_for
from megatron_rl.convert.hf import INDEX, HfReader, HfWriter
from megatron_rl.convert.source import Source

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 13,
    "hidden_size": 6,
    "intermediate_size": 10,
    "moe_intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "dtype": "bfloat16",
}
GATE = "model.layers.0.mlp.experts.2.gate_proj.weight"


def random_tensors() -> dict[str, Tensor]:
    family = family_for(CONFIG)
    shape = family.shape(CONFIG)
    pairs = [pair for slot in family.slots(shape) for pair in zip(slot.hf_names, slot.hf_shapes(shape), strict=True)]
    return {name: torch.randn(size, generator=torch.Generator().manual_seed(i)) for i, (name, size) in enumerate(pairs)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint in one file."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(CONFIG))
    (target / "tokenizer.json").write_text("{}")
    save_file(random_tensors(), target / "model.safetensors")
    return target


def open_source(folder: Path) -> Source:
    reader = HfReader(folder)
    family = family_for(reader.config)
    return Source(reader, family, family.shape(reader.config))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def split_in_two(folder: Path) -> None:
    """One file of the checkpoint becomes two with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: file for file, part in halves.items() for n in part}}))


def test_one_file_and_two_read_alike(folder: Path) -> None:
    expected = random_tensors()
    for _ in range(2):
        source = open_source(folder)
        assert all(torch.equal(source.tensor(name), tensor) for name, tensor in expected.items())
        if (folder / "model.safetensors").is_file():
            split_in_two(folder)


def test_fused_experts_read_like_single_ones(folder: Path) -> None:
    def fuse(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            experts = f"model.layers.{layer}.mlp.experts."
            take = {p: [tensors.pop(f"{experts}{e}.{p}_proj.weight") for e in range(3)] for p in ("gate", "up", "down")}
            tensors[experts + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(take["gate"], take["up"], strict=True)])
            tensors[experts + "down_proj"] = torch.stack(take["down"])

    rewrite(folder, fuse)
    assert GATE not in HfReader(folder).names()
    source = open_source(folder)
    assert all(torch.equal(source.tensor(name), tensor) for name, tensor in random_tensors().items())


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def drop_shard(folder: Path) -> None:
    split_in_two(folder)
    (folder / "b.safetensors").unlink()


def duplicate(folder: Path) -> None:
    split_in_two(folder)
    save_file(load_file(folder / "b.safetensors") | {GATE: torch.zeros(5, 6)}, folder / "b.safetensors")


def promise_too_much(folder: Path) -> None:
    split_in_two(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = "a.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def drop_index(folder: Path) -> None:
    split_in_two(folder)
    (folder / INDEX).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors: is damaged or truncated"),
        (drop_shard, "b.safetensors: is missing, but model.safetensors.index.json names it"),
        (duplicate, f"tensor '{GATE}' is in both a.safetensors and b.safetensors; remove one"),
        (promise_too_much, "model.safetensors.index.json says that a.safetensors holds tensor 'ghost', but it does not"),
        (drop_index, "has 2 .safetensors files but no model.safetensors.index.json"),
        (lambda f: (f / "model.safetensors").unlink(), "has no .safetensors file"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: is not JSON"),
        (lambda f: rewrite(f, lambda t: t.pop(GATE)), f"tensor {GATE} is missing"),
        (
            lambda f: rewrite(f, lambda t: t.update({GATE: t[GATE].T.contiguous()})),
            f"tensor {GATE} has shape (6, 5), but config.json makes it (5, 6)",
        ),
        (
            lambda f: rewrite(f, lambda t: t.update(ghost=torch.zeros(1))),
            "tensor ghost does not belong to a Qwen3-MoE model of this config.json",
        ),
        (
            lambda f: rewrite(f, lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(3, 6, 5)})),
            "tensor model.layers.0.mlp.experts.0.down_proj.weight is there twice, by itself and in model.layers.0.mlp.experts.down_proj",
        ),
        (
            lambda f: rewrite(f, lambda t: t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(2, 6, 5)})),
            "tensor model.layers.0.mlp.experts.down_proj has shape (2, 6, 5), but config.json makes it (3, 6, 5)",
        ),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        open_source(folder)


@pytest.mark.parametrize(("shard_bytes", "files"), [(1 << 20, 1), (1000, 5)])
def test_written_folder_is_whole(folder: Path, tmp_path: Path, shard_bytes: int, files: int) -> None:
    # The tensors are 4,824 bytes of float32: at least 5 files of 1,000 bytes, or one of a MiB.
    with HfWriter(tmp_path / "out", folder, shard_bytes=shard_bytes) as writer:
        for name, tensor in random_tensors().items():
            writer.add(name, tensor)
        assert not (tmp_path / "out").exists()
    written = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (len(written) == 1) if files == 1 else (len(written) >= files)
    assert (tmp_path / "out" / INDEX).is_file() == (files > 1)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    # The tensors are float32, whatever the template's were.
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG | {"dtype": "float32"}
    source = open_source(tmp_path / "out")
    assert all(torch.equal(source.tensor(name), tensor) for name, tensor in random_tensors().items())


def test_an_interrupted_write_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())

    def write() -> None:
        with HfWriter(tmp_path / "out", folder, shard_bytes=100) as writer:
            for name, tensor in list(random_tensors().items())[:5]:
                writer.add(name, tensor)
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_existing_folder_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(ValueError, match="exists already; remove it or choose another folder"):
        HfWriter(folder, folder)


def quantise(folder: Path, *, block: int) -> dict[str, Tensor]:
    """Expert weights in block-scaled FP8; the weights they stand for."""
    config = CONFIG | {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        rows, columns = tensors[name].shape
        scales = torch.rand(-(-rows // block), -(-columns // block), generator=torch.Generator().manual_seed(rows)) + 0.5
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales
        meant[name] = torch.empty(rows, columns)
        for row in range(rows):
            for column in range(columns):
                meant[name][row, column] = tensors[name][row, column].float() * scales[row // block, column // block]
    save_file(tensors, folder / "model.safetensors")
    return meant


def test_block_scaled_fp8_reads_as_the_weights_it_stands_for(folder: Path) -> None:
    # Blocks of 4 leave a remainder in every dimension: experts are 5 x 6 and 6 x 5.
    meant = quantise(folder, block=4)
    source = open_source(folder)
    assert all(torch.equal(source.tensor(name), tensor) for name, tensor in meant.items())


def test_an_export_of_fp8_weights_is_plain(folder: Path, tmp_path: Path) -> None:
    meant = quantise(folder, block=4)
    with HfWriter(tmp_path / "out", folder) as writer:
        for name, tensor in meant.items():
            writer.add(name, tensor.bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG


def test_a_bias_in_fp32_leaves_the_models_dtype(folder: Path, tmp_path: Path) -> None:
    with HfWriter(tmp_path / "out", folder) as writer:
        writer.add("weight", torch.zeros(2, dtype=torch.float16))
        writer.add("bias", torch.zeros(2))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop(GATE + "_scale_inv"), f"tensor {GATE} is in float8 and has no _scale_inv tensor beside it"),
        (lambda t: t.update({GATE + "_scale_inv": torch.ones(2, 3)}), "_scale_inv has shape (2, 3), but its weight makes it (2, 2)"),
        (lambda t: t.update(ghost_scale_inv=torch.ones(1, 1)), "tensor ghost_scale_inv has no matrix ghost to scale"),
    ],
)
def test_damaged_scales_are_named(folder: Path, damage: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    quantise(folder, block=4)
    rewrite(folder, damage)
    with pytest.raises(ValueError, match=re.escape(message)):
        open_source(folder).tensor(GATE)
