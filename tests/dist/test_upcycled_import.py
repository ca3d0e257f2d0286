"""An upcycled model is one like any other to the importer: into a Megatron checkpoint and out again, without a bit lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from megatron_rl.convert.commands import hf_to_mcore, mcore_to_hf
from megatron_rl.convert.experts import Upcycling
from megatron_rl.convert.inspection import compare
from megatron_rl.convert.upcycle import upcycle

SIZES = {
    "vocab_size": 300,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("dense", "options"),
    [
        (LlamaForCausalLM(LlamaConfig(**SIZES)), Upcycling(experts=4, noise=0.1, kv_heads=4, router="norm", keep_above=None)),
        (Qwen2ForCausalLM(Qwen2Config(**SIZES)), Upcycling(family="qwen2_moe", experts=4, noise=0.1, router="norm", keep_above=None)),
    ],
    ids=["mixtral", "qwen2_moe"],
)
def test_import_and_export_give_the_same_bits(dense: torch.nn.Module, options: Upcycling, tmp_path: Path) -> None:
    dense.save_pretrained(tmp_path / "dense")
    upcycle(tmp_path / "dense", tmp_path / "moe", options)
    hf_to_mcore(str(tmp_path / "moe"), str(tmp_path / "mcore"))
    mcore_to_hf(str(tmp_path / "mcore"), str(tmp_path / "back"), str(tmp_path / "moe"))
    assert list(compare(tmp_path / "back", tmp_path / "moe")) == []
