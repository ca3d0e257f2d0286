"""The trainer's side: the same tokens under one condition after the other, from packed micro-batches to flat arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..actor.actor import Actor, Restriction, Scored
from ..actor.feed import Feed, hand_out
from ..config import Config, Dtype, ParallelConfig
from ..convert.families import family_for
from ..convert.hf import read_config
from ..routing.layout import LIVE
from ..routing.replay import Mode
from ..types import PackedBatch, RouterScores, TokenStats, Trajectory
from .batch import masked_layers, narrow, shares, to_flat, training_batch
from .config import EngineConfig, LabConfig
from .records import Condition, Rescored, TokenBatch


@dataclass(frozen=True)
class Answers:
    """What one engine setting sampled, on every rank."""

    engine: EngineConfig
    trajectories: tuple[Trajectory, ...]
    batch: TokenBatch


class Scorer:
    """One actor in one layout and dtype. Every method is collective over all ranks.

    Args:
        path: Hugging Face folder of the policy, for its architecture; `load` fills the weights.
        trains: whether it can take optimizer steps.
    """

    def __init__(self, config: LabConfig, mesh: Any, parallel: ParallelConfig, dtype: Dtype, path: str, *, trains: bool = False) -> None:
        hf = read_config(path)
        self._lab, self._path, self._dtype, self._parallel = config, path, dtype, parallel
        self.mesh = mesh
        self.actor = Actor(self._config(config.main), mesh, family_for(hf), hf, trains=trains)
        self._start: dict[tuple[str, str], list[RouterScores]] = {}
        """By engine setting and replay: the routers' experts and scores with the engine's weight version."""
        self._loaded: str | None = None

    def _config(self, engine: EngineConfig) -> Config:
        return self._lab.training(engine, self._dtype, self._parallel, self._path)

    def load(self, folder: str) -> None:
        """Weights of another checkpoint of the same architecture, unless they are there already."""
        if folder != self._loaded:
            self.actor.load_hf(folder)
            self._loaded = folder

    def aim(self, engine: EngineConfig) -> None:
        """Scores over the distribution that this engine samples from: its temperature, its keep-sets."""
        self.actor.config = self._config(engine)
        self.actor.restriction = Restriction(None) if self.actor.config.rollout.truncates else None

    def feed(self, answers: Answers, *, other: bool = False) -> Feed:
        """The answers, packed.

        Args:
            other: in another order and into smaller micro-batches.
        """
        order, budget = list(range(len(answers.trajectories))), self._lab.tokens_per_micro_batch
        if other:
            order, budget = order[::-1], max(budget // 2, max(len(t.tokens) for t in answers.trajectories))
            unit = 2 * self.mesh.context_size * self.mesh.tensor_size
            budget = -(-budget // unit) * unit
        mine = shares(self.mesh, order)[self.mesh.data_rank]
        return hand_out(
            self.mesh,
            self.actor.places,
            training_batch(answers.trajectories, answers.batch.advantage_S, mine) if self.mesh.is_leader else None,
            budget=budget,
            experts=self.actor.experts,
            max_tokens=self._lab.rollout.max_new_tokens,
            multiple=self.actor.micro_batch_multiple,
        )

    def score(self, answers: Answers, condition: Condition, feed: Feed, *, other: bool = False) -> Rescored:
        """What the trainer says of the tokens under a condition, with the weights that are loaded.

        Live forwards at lag 0 are remembered: R2 replays them.
        """
        batches, routing = self._routed(answers, condition, feed.micro_batches)
        moe = self.actor.experts > 0
        margins = moe and routing == "live"
        key = answers.engine.name, "none" if condition.replay == "R2" else condition.replay
        remembers = moe and condition.replayed_layers is None and not (condition.quantised or other)
        found = self.actor.score(
            batches,
            routing,
            entropy=True,
            router_scores=moe,
            router_margins=margins,
            compare_with=self._start[key] if remembers and condition.lag else None,
        )
        if remembers and not condition.lag:
            self._start[key] = found.router_scores
        order = list(range(len(answers.trajectories)))[:: -1 if other else 1]

        def flat(values: Sequence[Tensor]) -> NDArray[Any]:
            return to_flat(self.mesh, batches, values, order, answers.batch.offsets_S)

        shift_T = flat(found.shift) if found.shift else None
        return Rescored(condition, **self._arrays(found, batches, flat, answers.batch.mask_T, margins), shift_T=shift_T)

    def _routed(self, answers: Answers, condition: Condition, batches: list[PackedBatch]) -> tuple[list[PackedBatch], Mode]:
        if condition.replay == "none":
            return batches, "live"
        if condition.replay == "R2":
            recorded = self._start[answers.engine.name, "none"]
            return [dataclasses.replace(b, routes_TLK=r.experts_RLK) for b, r in zip(batches, recorded, strict=True)], "replay"
        layers = condition.replayed_layers
        if layers is not None:
            batches = [masked_layers(b, layers, self.actor.place.layers, LIVE) for b in batches]
        return batches, "replay"

    def _arrays(self, found: Scored, batches: Sequence[PackedBatch], flat: Any, mask_T: NDArray[np.bool_], margins: bool) -> dict[str, Any]:
        def masked(value: Callable[[TokenStats, PackedBatch], Tensor | None]) -> NDArray[np.float32]:
            found_T = [value(s, b) for s, b in zip(found.stats, batches, strict=True)] if found.stats else []
            return np.where(mask_T, flat(found_T), 0.0).astype(np.float32)

        out: dict[str, Any] = {"logp_T": masked(lambda s, _: s.logp_T), "entropy_T": masked(lambda s, _: s.entropy_T)}
        if any(b.candidate_ids_TK is not None for b in batches):
            out["noise_T"] = masked(_noise)
        if self.actor.experts:
            top_k = (int(self.actor.core.moe_router_topk),)
            out["routes_TLK"] = narrow(flat(self._joined([x.experts_RLK for x in found.router_scores], batches, torch.int32, top_k)))
        if margins:
            out["margin_TL"] = flat(self._joined(found.margins, batches, torch.float32))
        return out

    def _joined(
        self, local: Sequence[Tensor], batches: Sequence[PackedBatch], dtype: torch.dtype, tail: tuple[int, ...] = ()
    ) -> list[Tensor]:
        """[positions, layers of the whole model, *tail] a micro-batch from each rank's own rows and layers; a rank may have none."""
        joined = []
        for index, batch in enumerate(batches):
            whole = torch.zeros(self.actor.own_rows(batch).numel(), self.actor.moe_layers, *tail, dtype=dtype)
            if self.actor.place.layers:
                whole[:, list(self.actor.place.layers)] = local[index].to(whole)
            joined.append(self.actor.join(whole, batch, dtype))
        return joined


def _noise(stats: TokenStats, batch: PackedBatch) -> Tensor:
    """[positions] half the spread of log theta - log mu over the label and the engine's candidates (`Rescored.noise_T`)."""
    assert stats.candidate_logp_TK is not None and batch.candidate_ids_TK is not None and batch.candidate_logp_TK is not None
    device = stats.logp_T.device
    given_TK = (batch.candidate_ids_TK >= 0).to(device)
    gap_TK = stats.candidate_logp_TK - batch.candidate_logp_TK.to(device)
    label_T = stats.logp_T - batch.behaviour_logp_T.to(device)
    high_T = torch.where(given_TK, gap_TK, -torch.inf).amax(dim=1).maximum(label_T)
    low_T = torch.where(given_TK, gap_TK, torch.inf).amin(dim=1).minimum(label_T)
    return torch.where(batch.mask_T.to(device), (high_T - low_T) / 2, 0.0)
