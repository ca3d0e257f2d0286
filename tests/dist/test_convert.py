"""Tiny random checkpoints through a live Megatron model and back, under every kind of layout, and the logits beside transformers'.

Two workers, started once, observed by every test. The models have no two equal dimensions, a vocabulary that nothing divides, a
dense layer among the routed ones, and random values everywhere (norms too), so that a swapped or transposed tensor shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.dist.launch import run_ranks
from tools.check_families import GRADIENT_TOLERANCE, TOLERANCE, Row, cases, check
from tools.families.tiny import TINY

pytestmark = pytest.mark.dist

SIZES = {
    "vocab_size": 509,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 256,
}
ONE = [""]
TWO = ["", "tensor=2", "expert=2", "pipeline=2", "tensor=2 expert=2", "tensor=2 expert_tensor=2", "pipeline=2 virtual_pipeline=2"]
"""With two ranks, "" is data parallelism: rank 1 holds replicas and must send nothing."""
CASES = [(1, f"{model} {layout}") for layout in ONE for model in ("dense", "moe", "moe-raw")]
CASES += [(2, f"{model} {layout}") for layout in TWO for model in ("dense", "moe") if model == "moe" or "expert" not in layout]
"""How gates are normalised does not depend on the layout, so `moe-raw` runs in one process only."""
WITHOUT_PIPELINE = [case for case in CASES if "pipeline" not in case[1]]


def make_checkpoint(model: Any, folder: Path) -> None:
    """Random values everywhere, and transformers' own logits of 24 random tokens."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if "norm" in name else 0.08 * noise
    model.save_pretrained(folder)
    tokens = torch.randint(0, SIZES["vocab_size"], (24,), generator=generator)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens[None]).logits[0]
    (folder / "reference").mkdir()
    save_file({"tokens": tokens, "logits": logits.contiguous()}, folder / "reference" / "logits.safetensors")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three: `moe` (normalised gates, one dense layer), `moe-raw` (gates as they are), `dense` (tied embeddings)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("checkpoints")
    experts = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
    moe = Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=True, mlp_only_layers=[1])
    raw = Qwen3MoeConfig(**SIZES, **experts, norm_topk_prob=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    make_checkpoint(Qwen3MoeForCausalLM(moe), folder / "moe")
    make_checkpoint(Qwen3MoeForCausalLM(raw), folder / "moe-raw")
    make_checkpoint(Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)), folder / "dense")
    return folder


@pytest.fixture(scope="module")
def seen(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the worker saw with one process and with two."""
    out = tmp_path_factory.mktemp("seen")
    for processes in (1, 2):
        cases = [case for count, case in CASES if count == processes]
        run_ranks("convert.py", str(checkpoints), str(out / f"{processes}.json"), json.dumps(cases), processes=processes)
    return {processes: json.loads((out / f"{processes}.json").read_text()) for processes in (1, 2)}


@pytest.mark.parametrize(("processes", "case"), CASES)
def test_round_trip_is_bit_exact(seen: dict[int, dict[str, Any]], checkpoints: Path, processes: int, case: str) -> None:
    """Every tensor of the folder once and unchanged on rank 0; the same names in the same order and no tensor elsewhere.

    Whether in one exchange, twice, or in many small ones with ranks that drift apart.
    """
    from safetensors import safe_open

    with safe_open(checkpoints / case.split()[0] / "model.safetensors", "pt") as file:
        stored = sorted(file.keys())
    for kind in ("export", "again", "slow"):
        main, *others = seen[processes]["runs"][case][kind]
        assert sorted(main["names"]) == stored
        assert main["different"] == [] and main["held"]
        assert all(rank["names"] == main["names"] and not rank["held"] for rank in others)


@pytest.mark.parametrize(("processes", "case"), CASES)
def test_export_casts_and_padding_is_zero(seen: dict[int, dict[str, Any]], processes: int, case: str) -> None:
    assert seen[processes]["runs"][case]["bfloat16"]
    assert seen[processes]["runs"][case]["padding_is_zero"]


@pytest.mark.parametrize(("processes", "case"), WITHOUT_PIPELINE)
def test_logits_equal_those_of_transformers(seen: dict[int, dict[str, Any]], processes: int, case: str) -> None:
    # fp32 sums in another order over rows of at most 80 terms; logits are of order 1.
    assert seen[processes]["runs"][case]["max_logit_diff"] < 2e-5


@pytest.mark.parametrize("processes", [1, 2])
def test_distributed_checkpoints_come_back_under_another_layout(seen: dict[int, dict[str, Any]], processes: int) -> None:
    # Two processes write with TP 2 and read with PP 2.
    assert seen[processes]["commands"] == {"moe": [], "dense": []}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("architecture", "architectures = ['GemmaForCausalLM'] is not supported; supported are Qwen3MoeForCausalLM, Qwen3ForCausalLM"),
        ("vocabulary", "vocab_size = 4096 does not fit the model, whose padded vocabulary is 512"),  # 509 rounded up to 128 x 4
        ("layers", "num_hidden_layers = 3, but the model was built with 4"),
        ("width", "local_experts.0.linear_fc1.weight has shape (48, 48), but config.json makes it (80, 48)"),  # gate and up: 2 x 24, 2 x 40
        ("experts", "decoder.layers.0.mlp.router.weight has shape (8, 48), but config.json makes it (16, 48)"),
        ("kind", "the model on rank 0 lacks decoder.layers.1.mlp.router.weight"),
    ],
)
def test_a_model_built_for_another_config_is_refused(seen: dict[int, dict[str, Any]], name: str, message: str) -> None:
    assert message in seen[1]["mismatches"][name]


FAMILIES = [*cases(list(TINY), ["TP2 EP2"]), *((family, layout) for family in ("deepseek-v3", "gpt-oss") for layout in ("PP2", "CP2"))]
"""Two processes, started once; dense families divide tensors only. tools/check_families.py has every layout."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Row]:
    """Each family's tiny model through Megatron, beside transformers."""
    rows = check(FAMILIES, tmp_path_factory.mktemp("families"), timeout=280)
    return {(row.family, row.layout): row for row in rows}


@pytest.mark.parametrize("case", FAMILIES, ids=" ".join)
def test_every_family_is_exact_and_computes_what_transformers_does(families: dict[tuple[str, str], Row], case: tuple[str, str]) -> None:
    row = families[case]
    assert row.different == ()
    assert row.max_logit_diff <= TOLERANCE and row.max_gradient_diff <= GRADIENT_TOLERANCE
