"""The makers of checkpoints and data, and the scripts' grammar."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_chain_sum import Sizes, make_chain_sum, worked_steps
from tools.make_tiny_moe import EOS_ID, TinyModel, build_tokenizer, make_tiny_moe, parse_args

ROOT = Path(__file__).parents[2]
SMALL = TinyModel(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=4, ffn=16, seed=5)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe"), SMALL)


def test_the_file_has_every_expert_by_name_as_qwen_publishes_them(small: Path) -> None:
    with safe_open(small / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    for layer in range(2):
        for expert in range(4):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            assert shapes[f"{prefix}.gate_proj.weight"] == shapes[f"{prefix}.up_proj.weight"] == (16, 32)
            assert shapes[f"{prefix}.down_proj.weight"] == (32, 16)
        assert shapes[f"model.layers.{layer}.mlp.gate.weight"] == (4, 32)
    # Embedding, output, last norm; a layer: 4 attention matrices, 2 head norms, 2 norms, a router, 4 experts of 3.
    assert len(shapes) == 3 + 2 * (4 + 2 + 2 + 1 + 4 * 3)


def test_transformers_loads_it_and_the_seed_decides_the_weights(small: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(small)
    assert model.config.num_experts_per_tok == 2
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 512)
    again = load_file(make_tiny_moe(tmp_path / "again", SMALL) / "model.safetensors")
    first = load_file(small / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = load_file(make_tiny_moe(tmp_path / "other", TinyModel(**{**SMALL.__dict__, "seed": 6})) / "model.safetensors")
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_the_default_has_the_size_of_the_recipe() -> None:
    _, sizes = parse_args(["--out", "x"])
    attention = 128 * (128 + 64 + 64) + 128 * 128 + 2 * 32
    layer = attention + 2 * 128 + 8 * 128 + 8 * 3 * 64 * 128
    total = sizes.layers * layer + 2 * 512 * 128 + 128
    assert round(total / 1e6, 2) == 1.12
    assert parse_args(["--out", "x", "--layers", "16", "--dense"])[1] == TinyModel(layers=16, dense=True)


def test_a_dense_model_has_no_router(tmp_path: Path) -> None:
    folder = make_tiny_moe(tmp_path, TinyModel(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, dense_ffn=64, dense=True))
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert not [name for name in load_file(folder / "model.safetensors") if "experts" in name or "mlp.gate." in name]


@pytest.mark.parametrize("mistake", [{"vocab": 100}, {"heads": 4, "kv_heads": 3}, {"topk": 9}])
def test_impossible_sizes_are_named(mistake: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"{list(mistake)[-1]}: {list(mistake.values())[-1]} must"):
        TinyModel(**mistake)  # type: ignore[arg-type]


def test_the_tokenizer_says_any_text_and_keeps_digits_apart(small: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small)
    assert len(tokenizer("4-11=")["input_ids"]) == 5
    assert tokenizer("4-11=")["input_ids"] == build_tokenizer()("4-11=")["input_ids"]
    for text in ("4-1=3;3-7=-4#-4", "héllo 中文\n\t", " 1  2 "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == EOS_ID == tokenizer("<|im_end|>")["input_ids"][0]
    assert max(tokenizer.get_vocab().values()) < 512


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chain_sum(tmp_path_factory.mktemp("chain"), Sizes(train=3000, teacher=3000, eval=512))


def test_held_out_prompts_are_distinct_and_in_neither_other_file(chain: Path) -> None:
    held_out = [row["prompt"] for row in rows(chain / "eval.jsonl")]
    assert len(held_out) == len(set(held_out)) == 512
    for name in ("train", "teacher"):
        assert set(held_out).isdisjoint(row["prompt"] for row in rows(chain / f"{name}.jsonl"))


def test_prompts_are_sums_of_three_or_four_digits_with_their_value(chain: Path) -> None:
    for row in rows(chain / "train.jsonl"):
        assert re.fullmatch(r"\d([+-]\d){2,3}=", row["prompt"])
        assert eval(row["prompt"][:-1]) == int(row["answer"])


def test_a_quarter_of_the_teachers_steps_slip_and_it_works_on_with_the_slip(chain: Path) -> None:
    slips, total = 0, 0
    for row in rows(chain / "teacher.jsonl"):
        working, final = row["completion"].split("#")
        results = [step.split("=") for step in working.split(";")]
        slips += sum(eval(left) != int(right) for left, right in results)
        total += len(results)
        assert final == results[-1][1]
        for (_, before), (left, _) in itertools.pairwise(results):
            assert left.startswith(before)
    # About 7,500 steps: the share's standard error is sqrt(0.25 * 0.75 / 7500) = 0.005.
    assert abs(slips / total - 0.25) < 0.02


def test_without_noise_the_teacher_is_right() -> None:
    assert worked_steps("4-1-7=", 0.0, random.Random(0)) == "4-1=3;3-7=-4#-4"


def test_the_seed_changes_train_and_teacher_and_not_the_held_out_file(chain: Path, tmp_path: Path) -> None:
    sizes = Sizes(train=50, teacher=50, eval=512, seed=1)
    other, again = make_chain_sum(tmp_path / "other", sizes), make_chain_sum(tmp_path / "again", sizes)
    assert (other / "eval.jsonl").read_text() == (chain / "eval.jsonl").read_text()
    assert rows(other / "train.jsonl") != rows(chain / "train.jsonl")[:50]
    for name in ("train", "teacher", "eval"):
        assert (other / f"{name}.jsonl").read_text() == (again / f"{name}.jsonl").read_text()


@pytest.mark.parametrize(
    "mistake", [{"noise": 1.0}, {"min_terms": 1}, {"eval": 0}, {"seed": 1000}, {"min_terms": 2, "max_terms": 2, "eval": 512}]
)
def test_impossible_data_is_named(mistake: dict[str, float]) -> None:
    name = list(mistake)[-1]
    with pytest.raises(ValueError, match=rf"^{name}: {mistake[name]} "):
        Sizes(**mistake)  # type: ignore[arg-type]


@pytest.mark.parametrize("script", ["tools/install.sh", "tools/test.sh", ".ci/run"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o100
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def test_installing_twice_does_nothing_the_second_time() -> None:
    """Where this checkout was set up by tools/install.sh; elsewhere (a hand-made environment) there is nothing to check."""
    if not (ROOT / ".venv" / "installed").is_file():
        pytest.skip("this checkout's .venv was not made by tools/install.sh")
    done = subprocess.run(["bash", str(ROOT / "tools/install.sh")], capture_output=True, text=True, timeout=10, check=True)
    assert done.stdout == "[install] everything is installed in .venv\n"
