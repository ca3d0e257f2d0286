"""A model's logits and routes on given tokens: a Hugging Face folder through transformers, a Megatron checkpoint through Megatron.

Two programs that share no code, so that their agreement says something of the conversion. In fp32, in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..actor.actor import Actor
from ..actor.checkpoint import load
from ..actor.parallel import Mesh
from ..config import ParallelConfig
from ..types import PackedBatch
from .families import family_for
from .hf import read_config
from .session import conversion_config


@dataclass(frozen=True)
class Answer:
    """What a model makes of one sequence of T tokens."""

    logits_TV: Tensor
    """fp32."""
    routes_TLK: Tensor | None
    """int64 experts of each layer that routes, in order of depth, sorted; None for a dense model."""


@torch.no_grad()
def through_transformers(folder: Path, sequences: Sequence[Sequence[int]]) -> list[Answer]:
    """A Hugging Face folder's answers, by transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    chosen: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):  # forward(hidden states, experts [T, K], weights), whatever the family
            module.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    answers = []
    for tokens in sequences:
        chosen.clear()
        logits_TV = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
        answers.append(Answer(logits_TV, _stacked([routes.reshape(len(tokens), -1) for routes in chosen])))
    return answers


@torch.no_grad()
def through_megatron(checkpoint: Path, described: Path, sequences: Sequence[Sequence[int]], mesh: Mesh) -> list[Answer]:
    """A Megatron checkpoint's answers.

    Args:
        described: the folder with the model's config.json.
        mesh: of one process.
    """
    hf = read_config(described)
    config = conversion_config(str(described), ParallelConfig(), "float32")
    actor = Actor(config, mesh, family_for(hf), hf, trains=False)
    load(checkpoint, {"actor": actor}, hf["architectures"][0])
    weight_VH = actor.chunks[-1].output_weight()[: actor.vocab_size]
    answers = []
    for tokens in sequences:
        logits, session = actor.score_each([_batch(tokens)], "record", lambda i, batch, hidden_TH: (hidden_TH @ weight_VH.T).cpu())
        routes = [session.recorded[0, number].cpu() for number in actor.replay.layer_numbers]
        answers.append(Answer(logits[0].float(), _stacked(routes)))
    return answers


def _stacked(routes: Sequence[Tensor]) -> Tensor | None:
    return torch.stack([layer.long().sort(-1).values for layer in routes], 1) if routes else None


def _batch(tokens: Sequence[int]) -> PackedBatch:
    """One sequence without padding and without loss."""
    length = len(tokens)
    nothing: dict[str, Any] = {
        "labels_T": torch.zeros(length, dtype=torch.long),
        "mask_T": torch.zeros(length, dtype=torch.bool),
        "sequence_T": torch.zeros(length, dtype=torch.long),
        "turns_T": torch.full((length,), -1),
        "advantages_T": torch.zeros(length),
        "behaviour_logp_T": torch.full((length,), float("nan")),
        "versions_T": torch.full((length,), -1),
        "sample_S": torch.zeros(1, dtype=torch.long),
    }
    return PackedBatch(
        tokens_T=torch.tensor(list(tokens)),
        positions_T=torch.arange(length),
        cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
        **nothing,
    )
