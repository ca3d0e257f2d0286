"""Weights that went through fewer bits, weights with noise, and the grid that they are measured in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.cli import main
from megatron_rl.command_line import parse_into
from megatron_rl.config import ParallelConfig, RolloutConfig
from megatron_rl.lab.conditions import Pass, conditions, passes
from megatron_rl.lab.config import EngineConfig, GridConfig, LabConfig, LabModelConfig, LagConfig, layout_name
from megatron_rl.lab.tiny import TinyModel, make_tiny_moe
from megatron_rl.lab.versions import derive, fp8_blocks, int8_channels, perturbation, quantisation


def test_int8_keeps_255_levels_a_channel() -> None:
    """Channel maxima 127 and 1.27: steps 1 and 0.01, so 3.4 -> 3 and 0.034 -> 0.03; the maximum itself comes back."""
    weight = torch.tensor([[127.0, 3.4, -3.6], [1.27, 0.034, -0.036]])
    torch.testing.assert_close(int8_channels(weight), torch.tensor([[127.0, 3.0, -4.0], [1.27, 0.03, -0.04]]))
    assert int8_channels(torch.zeros(2, 3)).eq(0).all(), "an empty channel stays empty"


def test_fp8_rounds_to_three_bits_of_mantissa_in_each_block() -> None:
    """Scale 1 (a block's maximum is 448): between 16 and 32 E4M3 steps by 2, so 17.2 -> 18. Another block has its own scale."""
    weight = torch.full((129, 2), 17.2)
    weight[0, 0] = 448.0
    found = fp8_blocks(weight)
    assert found[0].tolist() == [448.0, 18.0]
    assert found[128].tolist() == pytest.approx([17.2, 17.2], rel=1e-6), "row 128 begins a block, whose maximum it is"


@pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="needs nvidia-modelopt: pip install 'megatron-rl[lab-quant]'")
def test_modelopt_rounds_to_the_same_numbers() -> None:
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    found = quantisation("int8", "modelopt")("model.layers.0.mlp.experts.0.up_proj.weight", weight)
    torch.testing.assert_close(found, int8_channels(weight), atol=1e-6, rtol=0)


def test_modelopt_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("modelopt", "modelopt.torch.quantization.tensor_quant"):  # the second where another test imported it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"quantiser: 'modelopt' needs .*lab-quant"):
        quantisation("int8", "modelopt")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = TinyModel(vocab=300, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, experts=2, topk=1, ffn=16)
    return make_tiny_moe(tmp_path_factory.mktemp("tiny"), sizes)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_quantisation_leaves_router_embeddings_and_norms(model: Path, tmp_path: Path) -> None:
    before, after = weights(model), weights(derive(model, tmp_path / "int8", quantisation("int8")))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    expected = {n for n in before if "_proj.weight" in n}
    assert changed == expected and not any("gate.weight" in n or "embed" in n or "lm_head" in n for n in changed)
    assert (tmp_path / "int8" / "tokenizer.json").is_file(), "a server loads the folder as it is"


def test_perturbations_are_seeded_relative_and_add_up(model: Path, tmp_path: Path) -> None:
    before = weights(model)
    one, two = (weights(derive(model, tmp_path / f"{k}", perturbation(7, k, 0.01))) for k in (1, 2))
    again = weights(derive(model, tmp_path / "again", perturbation(7, 1, 0.01)))
    name = "model.embed_tokens.weight"
    assert torch.equal(one[name], again[name])
    moved, further = (one[name] - before[name]).std(), (two[name] - before[name]).std()
    assert float(moved / before[name].std()) == pytest.approx(0.01, rel=0.05)
    assert float(further / moved) == pytest.approx(2**0.5, rel=0.05), "two versions' noises are independent"


GRID = LabConfig(
    engines=(EngineConfig("bf16"), EngineConfig("int8", quantisation="int8")),
    grid=GridConfig(dtypes=("float32", "bfloat16"), layers=1, layouts=(ParallelConfig(tensor=2, expert=2),)),
    lag=LagConfig(source="perturb", lags=(2,)),
)


def test_the_grid_names_every_condition_once() -> None:
    named = {engine.name: [c for one in passes(GRID) for c in conditions(GRID, one, engine, 3)] for engine in GRID.settings}
    main, other = ([c.name for c in named[name]] for name in ("bf16", "int8"))
    assert len(set(main)) == len(main) and len(set(other)) == len(other)
    assert main[:7] == [
        "live fp32", "R3 fp32", "R3 fp32 layer 0", "R3 fp32 layer 1", "R3 fp32 layers 0-1", "R3 fp32 layer 2", "live fp32 lag 2",
    ]  # fmt: skip
    assert main[7:] == ["R2 fp32 lag 2", "R3 fp32 lag 2", "live bf16", "R3 bf16", "live fp32 tp2 ep2", "R3 fp32 tp2 ep2"]
    assert other == [
        "live fp32", "R3 fp32", "live fp32 lag 2", "R2 fp32 lag 2", "R3 fp32 lag 2", "live fp32 int8 weights", "R3 fp32 int8 weights",
        "live bf16", "R3 bf16",
    ]  # fmt: skip


def test_a_dense_model_is_scored_live_only() -> None:
    assert [c.name for c in conditions(GRID, Pass(GRID.parallel, "float32", 2), GRID.main, 0)] == ["live fp32 lag 2"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EngineConfig("a/b"), "engines: name: 'a/b' must be some text without a slash"),
        (lambda: EngineConfig("x", top_k=5), "rollout.keep_sets: 0 must be positive"),
        (lambda: LabConfig(engines=(EngineConfig("x"), EngineConfig("x"))), "must each have a name of their own"),
        (lambda: LagConfig(lags=(4, 1)), "lag.lags: .* must be positive and ascending"),
        (lambda: LagConfig(source="folders", lags=(1,)), "lag.folders: .* must name one folder for each of lags"),
        (lambda: LabModelConfig(path="x", tiny={"layers": 2}), "model.tiny: .* has no use where model.path is given"),
        (lambda: GridConfig(dtypes=()), "grid.dtypes: .* must name at least one"),
        (
            lambda: LabConfig(rollout=RolloutConfig(urls=("http://a:1",)), engines=(EngineConfig("x"), EngineConfig("y", dtype="float32"))),
            "rollout.urls: .* must be one server, of the one dtype of all engines",
        ),
    ],
)
def test_mistakes_are_named(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


def test_without_engines_there_is_one_as_rollout_says() -> None:
    (only,) = LabConfig(rollout=RolloutConfig(dtype="float16", temperature=0.8)).settings
    assert (only.name, only.dtype, only.temperature) == ("fp16", "float16", 0.8)


@pytest.mark.parametrize("name", ["lab_tiny", "lab_real"])
def test_the_example_configurations_are_valid(name: str) -> None:
    file = Path(__file__).resolve().parents[2] / "examples/configs" / f"{name}.yaml"
    config = parse_into(LabConfig, "lab", "", ["--config", str(file)])
    assert config.main.name == "bf16" and config.lag.lags
    assert config.tokens_per_micro_batch >= config.data.max_prompt_tokens + config.rollout.max_new_tokens


def test_layouts_are_named_by_what_is_split() -> None:
    assert layout_name(ParallelConfig()) == "one process"
    assert layout_name(ParallelConfig(tensor=2, pipeline=2, expert=4)) == "tp2 pp2 ep4"


def test_measure_wants_a_folder_and_names_unknown_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "measure"]) == 2
    assert "--out: is missing; name the folder" in capsys.readouterr().err
    assert main(["lab", "measure", "--out", "x", "--grid.leyers", "2"]) == 2
    assert "grid.leyers: there is no such key; did you mean grid.layers?" in capsys.readouterr().err
