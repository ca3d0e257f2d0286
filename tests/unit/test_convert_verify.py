"""What `convert inspect` and `convert verify` say of checkpoints of both kinds, and the progress that conversions show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl import cli
from megatron_rl.convert.commands import hf_to_mcore
from megatron_rl.convert.forward import Answer
from megatron_rl.convert.progress import Progress
from megatron_rl.convert.verify import LogitsReport, compare_answers
from tools.make_tiny_moe import TinyModel, make_tiny_moe

SIZES = TinyModel(vocab=384, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=4, topk=2, ffn=24)
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("hf") / "model", SIZES)


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_to_mcore(str(model), str(tmp_path_factory.mktemp("mcore") / "out"))


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model but for one number."""
    folder = make_tiny_moe(tmp_path_factory.mktemp("other") / "model", SIZES)
    tensors = load_file(folder / "model.safetensors")
    tensors[GATE][1, 1] += 0.5
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """One of token ids, one of text for the folder's tokenizer."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"tokens": [1, 2, 3, 50, 2]}\n{"prompt": "1+2="}\n')
    return file


def convert(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """What a conversion command prints."""
    assert cli.main(["convert", *map(str, arguments)]) == code
    return capsys.readouterr().out


def test_a_converted_model_passes(model: Path, checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(convert(capsys, 0, "verify", model, checkpoint, "--prompts", prompts, "--json"))
    weights, logits = found["weights"], found["logits"]
    assert found["passed"] and weights["different"] == [] and weights["rounded"] == 0
    assert weights["checksums"][0] == weights["checksums"][1] and len(weights["checksums"][0]) == 64
    # Ends: embedding, norm, head. A layer: 4 projections, 4 norms, a router, 4 experts of 3.
    assert weights["tensors"] == 3 + 2 * (8 + 1 + 12)
    assert logits["engines"] == ["transformers", "megatron"]
    assert len(logits["max_abs"][0]) == 5 and len(logits["mean_abs"]) == 2
    assert 0 < logits["share"] < 2e-5, "two programs, in another order of sums, and not one compared with itself"
    assert logits["routes_agreement"] == [1.0, 1.0]


def test_one_changed_number_fails(model: Path, checkpoint: Path, other: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = convert(capsys, 1, "verify", other, checkpoint, "--prompts", prompts)
    assert text.endswith("FAILED\n") and "1 tensors differ" in text
    assert f"{GATE}: float32 and float32, max |d| 0.5" in text
    found = json.loads(convert(capsys, 1, "verify", other, model, "--json"))
    assert [difference["name"] for difference in found["weights"]["different"]] == [GATE] and found["logits"] is None


def test_rounding_to_another_dtype_is_told_apart(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = hf_to_mcore(str(model), str(tmp_path / "half"), dtype="bfloat16")
    text = convert(capsys, 0, "verify", model, step)
    assert "45 tensors are in another dtype, and equal when rounded to the narrower one" in text


def test_a_bound_decides(model: Path, checkpoint: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "bound 1e-12" in convert(capsys, 1, "verify", model, checkpoint, "--prompts", prompts, "--bound", "1e-12")


def test_prompts_that_are_none_are_named(model: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    for line, message in (('{"tokens": [384]}', "[384] is no list of token ids from 0 to 383"), ('{"text": "a"}', "is neither")):
        file.write_text(line + "\n")
        assert cli.main(["convert", "verify", str(model), str(checkpoint), "--prompts", str(file)]) == 2
        assert message in capsys.readouterr().err


def test_not_a_number_never_passes() -> None:
    """A maximum in Python may lose a nan."""
    good = Answer(torch.ones(3, 4), torch.zeros(3, 1, 2, dtype=torch.long))
    bad = replace(good, logits_TV=torch.tensor([[1.0] * 4, [float("nan")] * 4, [1.0] * 4]))
    found = compare_answers(("a", "b"), [good], [bad])
    assert isinstance(found, LogitsReport) and not found.share <= 1e30
    assert found.routes_agreement == (1.0,)


def test_inspection_of_both_kinds(model: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = json.loads(convert(capsys, 0, "inspect", model, "--json"))
    found = json.loads(convert(capsys, 0, "inspect", checkpoint.parent, "--json"))
    for fact in ("family", "architecture", "layers", "moe_layers", "experts"):
        assert found[fact] == folder[fact]
    assert found["format"] == "torch_dist 1" and not found["has_optimizer"] and found["step"] == 0
    assert found["parameters"] == folder["parameters"]  # 384 divides by 128: nothing is padded
    shapes = {tensor["key"]: tensor["shape"] for tensor in found["tensors"]}
    assert shapes["embedding.word_embeddings.weight"] == [384, 32]
    text = convert(capsys, 0, "inspect", checkpoint)
    assert (
        "Qwen3-MoE" in text
        and "tensors" in text
        and "embedding.word_embeddings.weight" in convert(capsys, 0, "inspect", checkpoint, "--json")
    )


def test_progress_in_words() -> None:
    progress = Progress("hf-to-mcore", 600 << 20, shown=False)
    progress.skip(100 << 20)  # an earlier run wrote them
    progress.add(200 << 20)
    # 200 of the 500 MiB that are left, in 2 seconds: 104.9 MB/s, and 300 MiB take 3 more.
    assert progress.line(2.0) == "hf-to-mcore: 200 of 500 MiB, 105 MB/s, 3 s left"
