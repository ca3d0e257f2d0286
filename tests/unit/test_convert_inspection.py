"""What a checkpoint folder is said to hold, and where two of them differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.convert.inspection import Difference, compare, describe
from tools.make_tiny_moe import TinyModel, make_tiny_moe

SIZES = TinyModel(vocab=300, hidden=12, layers=2, heads=2, kv_heads=1, head_dim=4, experts=3, topk=2, ffn=5)
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_moe(tmp_path / "model", SIZES)


def test_description_counts_what_config_json_makes(folder: Path) -> None:
    found = describe(folder)
    assert (found.family, found.layers, found.moe_layers, found.experts) == ("Qwen3-MoE", 2, 2, 3)
    # Ends: two of 300 x 12 and a norm of 12. A layer: q 8 x 12, k and v 4 x 12 each, o 12 x 8, norms 4 + 4 + 12 + 12; router 3 x 12;
    # 3 experts of 3 x 5 x 12.
    assert found.parameters == 2 * 300 * 12 + 12 + 2 * (96 + 48 + 48 + 96 + 32 + 36 + 3 * 180)
    assert found.tensors == 3 + 2 * (8 + 1 + 9)  # a layer: 4 projections and 4 norms, a router, 3 experts of 3
    assert found.dtypes == {"F32": found.tensors}
    assert found.bytes > 4 * found.parameters


def test_a_damaged_folder_is_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != GATE}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"tensor {GATE} is missing"):
        describe(folder)


def test_differences_are_named_and_measured(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_moe(tmp_path / "other", SIZES)
    assert list(compare(folder, other)) == []  # the same sizes and seed give the same weights
    tensors = load_file(other / "model.safetensors")
    tensors[GATE][1, 1] += 0.5
    tensors["model.norm.weight"] = torch.ones(12, dtype=torch.bfloat16)  # all ones before, too
    save_file(tensors, other / "model.safetensors")
    gate, norm = compare(folder, other)
    assert gate.name == GATE and gate.max_abs == pytest.approx(0.5, abs=1e-6)
    assert norm == Difference("model.norm.weight", ("float32", "bfloat16"), 0.0)


def test_models_of_other_sizes_do_not_compare(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_moe(tmp_path / "other", TinyModel(vocab=300))
    with pytest.raises(ValueError, match="are models of different families or sizes"):
        list(compare(folder, other))
