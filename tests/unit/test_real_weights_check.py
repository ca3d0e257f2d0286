"""The check at the end of examples/real_weights.sh, on a tiny model: what it measures without a server, and what makes it fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_rl.convert.experts import Upcycling
from megatron_rl.convert.upcycle import upcycle
from tools.check_real_weights import distances, holds, table
from tools.make_tiny_moe import build_tokenizer
from tools.stage import run_stage

GOOD: dict[str, Any] = {
    "perplexity_dense": 7.0,
    "distances": {"copy": {"max_logit": 1e-5, "kl": 0.0, "perplexity": 7.0}},
    "tensors": 10,
    "tensors_changed_by_import_and_export": 0,
    "tensors_changed_by_the_step": 9,
    "same_text": True,
    "answers": {"hf": {"texts": ["Paris\nis it."], "start_seconds": 30.0, "tokens_per_second": 8.0, "gib": 2.0}},
    "stages": [{"name": "export", "seconds": 12.3, "gib": 1.5}],
}


def test_identical_experts_are_at_no_distance_and_noise_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3, tie_word_embeddings=True)).save_pretrained(tmp_path / "dense")
    build_tokenizer().save_pretrained(tmp_path / "dense")
    for name, noise in (("copy", 0.0), ("moe", 0.3)):
        upcycle(tmp_path / "dense", tmp_path / name, Upcycling(experts=2, noise=noise, router="norm", keep_above=None))
    perplexity, away = distances(tmp_path / "dense", [tmp_path / "copy", tmp_path / "moe"])
    # Rounding of fp32 logits, and its square in a divergence.
    assert away["copy"].max_logit < 1e-4 and abs(away["copy"].kl) < 1e-6
    assert away["copy"].perplexity == pytest.approx(perplexity, rel=1e-5)
    assert away["moe"].max_logit > 0.1 and away["moe"].kl > 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"tensors_changed_by_import_and_export": 1},
        {"same_text": False},
        {"tensors_changed_by_the_step": 0},
        {"answers": {"hf": {"texts": ["Paris", " "]}}},
    ],
)
def test_what_fails_the_check(change: dict[str, Any]) -> None:
    assert holds(GOOD)
    assert not holds(GOOD | change)


def test_the_table_has_every_number() -> None:
    lines = table(GOOD).splitlines()
    assert "| (dense) | | | 7.000 |" in lines and "| no noise | 1.0e-05 | 0.0e+00 | 7.000 |" in lines
    assert "| after one step | 30 s | 8.0 | 2.0 GiB | “Paris is it.” |" in lines and "| export | 12 | 1.5 GiB |" in lines


def test_stages_are_written_down_where_they_succeed(tmp_path: Path) -> None:
    file = tmp_path / "stages.jsonl"
    assert run_stage(file, "fails", [sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert run_stage(file, "works", [sys.executable, "-c", "x = bytearray(200 << 20)"]) == 0
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["name"] == "works" and row["gib"] > 0.19
