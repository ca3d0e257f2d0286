"""The tensors of a mixture of experts made from a dense model's, and what there is to choose about them; `upcycle` says why."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..config import Dtype
from .activations import LayerActivations
from .family import Family, Slot
from .layouts import ModelShape
from .rows import LAYER
from .source import Source


@dataclass(frozen=True)
class Upcycling:
    """What becomes of the dense model."""

    family: Literal["mixtral", "qwen2_moe"] = "mixtral"
    """mixtral: experts of the dense width. qwen2_moe: the dense layer as shared expert, and small routed ones."""
    experts: int = 8
    """Of each layer."""
    top_k: int = 2
    """Experts a token goes to; at least 2."""
    noise: float = 0.0
    """mixtral: added to every expert, in standard deviations of the dense matrix. qwen2_moe: factor of routed down-projections."""
    partial_reinit: float = 0.0
    """Share of each expert's intermediate units that start anew."""
    keep_above: float | None = 50.0
    """Layers whose measured output is larger than this keep identical experts; null for none."""
    keep_layers: tuple[int, ...] = ()
    """More layers that keep identical experts, counted from 0."""
    expert_width: int | None = None
    """Of a routed expert, for qwen2_moe only; null takes an eighth of the dense width."""
    kv_heads: int | None = None
    """Key-value heads to pad to with zeros where tensor parallelism would not divide the model's own; null for none."""
    router: Literal["measured", "norm"] = "measured"
    """Scale of the routers' logits: from the prompts, or from the norm's weights without running the model."""
    router_std: float = 1.0
    """Standard deviation of a router's logits over tokens."""
    prompts: str | None = None
    """Text file to measure on, one prompt a line; null takes six short built-in texts."""
    seed: int = 0
    """Of noise, units and routers."""
    dtype: Dtype | None = None
    """Of the written tensors; null keeps the dense model's."""

    def __post_init__(self) -> None:
        checks = [
            (self.experts >= 2, "experts", "must be at least 2"),
            (self.top_k >= 2, "top_k", "must be at least 2: gates are normalised over the chosen experts, so a single one is always 1"),
            (self.top_k <= self.experts, "top_k", f"must be at most the {self.experts} experts"),
            (self.noise >= 0, "noise", "must be 0 or more"),
            (0 <= self.partial_reinit <= 1, "partial_reinit", "must be between 0 and 1"),
            (self.keep_above is None or self.keep_above > 0, "keep_above", "must be positive, or null"),
            (self.router_std > 0, "router_std", "must be positive"),
            (self.expert_width is None or self.family == "qwen2_moe", "expert_width", "is for --family qwen2_moe; mixtral keeps the width"),
        ]
        for holds, name, remedy in checks:
            if not holds:
                raise ValueError(f"{name}: {getattr(self, name)!r} {remedy}")


class ExpertMaker:
    """Makes the tensors of each slot of the mixture from the dense model's.

    Args:
        source, family, dense: the dense model.
        shape: of the mixture.
        kept: layers whose experts stay identical.
        measured: of every layer, for `router` measured.
    """

    def __init__(
        self,
        source: Source,
        family: Family,
        dense: ModelShape,
        shape: ModelShape,
        options: Upcycling,
        kept: Sequence[int],
        measured: Sequence[LayerActivations] | None,
    ) -> None:
        self._source, self._dense, self._shape, self._options, self._kept = source, dense, shape, options, frozenset(kept)
        self._measured = measured if options.router == "measured" else None
        self._rows = {mapping.key: mapping for mapping in family.tensors}
        self._makers = {
            "mlp.router.weight": self._router,
            "mlp.experts.local_experts.{expert}.linear_fc1.weight": self._gate_and_up,
            "mlp.experts.local_experts.{expert}.linear_fc2.weight": self._down,
            "mlp.shared_experts.linear_fc1.weight": self._shared_gate_and_up,
            "mlp.shared_experts.linear_fc2.weight": self._shared_down,
            "mlp.shared_experts.gate_weight": self._shared_gate,
        }

    def __call__(self, slot: Slot) -> tuple[Tensor, ...]:
        """One tensor a name in `slot.hf_names`: made from the dense feed-forward layer, or the dense model's own."""
        make = self._makers.get(slot.mapping.key.removeprefix(LAYER))
        if make is not None:
            return make(slot)
        key = slot.mapping.key
        if key == "output_layer.weight" and self._dense.tied:
            key = "embedding.word_embeddings.weight"
        return tuple(self._source.tensor(name) for name in Slot(self._rows[key], slot.layer).hf_names)

    def _mlp(self, slot: Slot, name: str) -> Tensor:
        """A dense matrix with its units as rows."""
        tensor = self._source.tensor(f"model.layers.{slot.layer}.mlp.{name}_proj.weight")
        return tensor.t() if name == "down" else tensor

    def _gate_and_up(self, slot: Slot) -> tuple[Tensor, ...]:
        return self._expert(slot, "gate"), self._expert(slot, "up")

    def _down(self, slot: Slot) -> tuple[Tensor, ...]:
        return (self._expert(slot, "down").t(),)

    def _expert(self, slot: Slot, name: str) -> Tensor:
        """A matrix of a routed expert, its units as rows."""
        weight = self._mlp(slot, name)
        kept = slot.layer in self._kept
        small = self._options.family == "qwen2_moe"
        if small:
            weight = weight[self._units(slot, "slice", self._dense.ffn, self._shape.moe_ffn)]
        if not kept:
            weight = self._reinitialised(weight, slot, name)
        noise = 0.0 if kept else self._options.noise
        if small:
            return weight * noise if name == "down" else weight
        if not noise:
            return weight
        exact = weight.float()
        return (exact + noise * exact.std() * self._normal(exact.shape, slot, name, "noise")).to(weight.dtype)

    def _reinitialised(self, weight: Tensor, slot: Slot, name: str) -> Tensor:
        units = self._units(slot, "new", self._shape.moe_ffn, round(self._options.partial_reinit * self._shape.moe_ffn))
        if not len(units):
            return weight
        old, weight = weight[units].float(), weight.clone()
        weight[units] = (old.mean() + old.std() * self._normal(old.shape, slot, name, "new")).to(weight.dtype)
        return weight

    def _units(self, slot: Slot, what: str, of: int, count: int) -> Tensor:
        """`count` distinct units, the same for the three matrices of an expert."""
        return torch.randperm(of, generator=self._generator(slot, what))[:count]

    def _normal(self, size: Sequence[int], slot: Slot, *what: str) -> Tensor:
        return torch.randn(tuple(size), generator=self._generator(slot, *what))

    def _generator(self, slot: Slot, *what: str) -> torch.Generator:
        """Draws belong to their tensor: another order of writing, or one more expert, leaves the others as they were."""
        text = "/".join(map(str, (self._options.seed, slot.layer, slot.expert, *what)))
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1)

    def _router(self, slot: Slot) -> tuple[Tensor, ...]:
        assert slot.layer is not None
        rows_NH = self._normal((self._shape.experts, self._shape.hidden), slot, "router")
        norm_H = self._source.tensor(f"model.layers.{slot.layer}.post_attention_layernorm.weight")
        if self._measured is None:
            # An RMS norm's output has the length of its weights, so a unit normal row gives it logits of that deviation.
            return ((rows_NH * self._options.router_std / norm_H.float().norm()).to(norm_H.dtype),)
        inputs_TH = self._measured[slot.layer].inputs_TH
        mean_H = torch.nn.functional.normalize(inputs_TH.mean(0), dim=0)
        rows_NH = rows_NH - (rows_NH @ mean_H)[:, None] * mean_H
        deviation_N = (inputs_TH @ rows_NH.t()).std(0)
        return ((rows_NH * (self._options.router_std / deviation_N)[:, None]).to(norm_H.dtype),)

    def _shared_gate_and_up(self, slot: Slot) -> tuple[Tensor, ...]:
        return self._mlp(slot, "gate"), self._mlp(slot, "up")

    def _shared_down(self, slot: Slot) -> tuple[Tensor, ...]:
        return (2 * self._mlp(slot, "down").t(),)

    def _shared_gate(self, slot: Slot) -> tuple[Tensor, ...]:
        return (self._mlp(slot, "gate").new_zeros(1, self._shape.hidden),)
