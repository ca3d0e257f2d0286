"""Sequences as plain tensors, packed the way training packs them, so that every method can be run under every packing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config import MethodConfig, ObjectiveConfig
from megatron_rl.methods import registry
from megatron_rl.methods.catalog import METHODS
from megatron_rl.methods.objective import Denominators, Tokens, TopK
from megatron_rl.methods.segments import LocalSegments
from megatron_rl.methods.stack import Stack

MAX_TOKENS = 7.0
K = 3


@dataclass(frozen=True)
class Seq:
    """One trajectory's positions; fp64. `mask` False marks tool tokens, whose values must not matter."""

    logp: Tensor
    old: Tensor
    mu: Tensor
    advantages: Tensor
    mask: Tensor
    turns: Tensor
    uniform: Tensor
    shift: Tensor
    reference: Tensor
    top_theta: Tensor
    top_old: Tensor
    top_mu: Tensor
    has_label: Tensor
    inside: Tensor
    kept_mass: Tensor


def make(logp: Tensor, old: Tensor | None = None, mu: Tensor | None = None, advantages: Tensor | float = 1.0, **more: Tensor) -> Seq:
    """What a test cares about; the rest is on-policy, one turn, routing unmoved, theta its own reference, nothing pruned."""
    n = logp.numel()
    old = logp.clone() if old is None else old
    mu = old.clone() if mu is None else mu
    if not isinstance(advantages, Tensor):
        advantages = torch.full((n,), advantages, dtype=logp.dtype)
    rest = torch.log1p(-logp.exp()).unsqueeze(1) - torch.tensor([1.0, 2.0, 3.0])
    defaults = {
        "mask": torch.ones(n, dtype=torch.bool),
        "turns": torch.zeros(n, dtype=torch.int64),
        "uniform": torch.full((n,), 0.5, dtype=logp.dtype),
        "shift": torch.zeros(n, dtype=logp.dtype),
        "reference": logp.clone(),
        "top_theta": rest,
        "top_old": rest.clone(),
        "top_mu": rest.clone(),
        "has_label": torch.zeros(n, dtype=torch.bool),
        "inside": torch.ones(n, dtype=torch.bool),
        "kept_mass": torch.ones(n, dtype=logp.dtype),
    }
    return Seq(logp, old, mu, advantages, **{**defaults, **more})  # type: ignore[arg-type]


def random_seq(length: int, generator: torch.Generator, spread: float = 0.4, tool_share: float = 0.25) -> Seq:
    """A sequence with drift between all three policies, tool tokens, two or three turns, and one advantage a token."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    mu = -0.05 - 1.5 * uniform(length)
    old = (mu + spread / 2 * normal(length)).clamp(max=-1e-3)
    logp = (old + spread * normal(length)).clamp(max=-1e-3)
    # Three candidates share 90 % of what the label leaves, under each policy; where they contain the label, the first one is it.
    has_label = uniform(length) < 0.5

    def candidates(label: Tensor) -> Tensor:
        rest = torch.log1p(-label.exp()).unsqueeze(1) + torch.log_softmax(normal(length, K), dim=1) + torch.log(torch.tensor(0.9))
        return torch.where(has_label.unsqueeze(1) & (torch.arange(K) == 0), label.unsqueeze(1), rest)

    mask = uniform(length) >= tool_share
    mask[int(torch.randint(length, (1,), generator=generator))] = True
    aside = generator.clone_state()  # drawn aside, so that the values above are those that the tests' thresholds were chosen for
    return Seq(
        logp, old, mu, normal(length), mask,
        turns=(torch.arange(length) * 3) // length,
        uniform=uniform(length),
        shift=0.5 * uniform(length),
        reference=mu + 0.2 * normal(length),
        top_theta=candidates(logp), top_old=candidates(old), top_mu=candidates(mu), has_label=has_label,
        inside=torch.rand(length, generator=aside) < 0.85,
        kept_mass=1 - 0.1 * torch.rand(length, generator=aside, dtype=torch.float64),
    )  # fmt: skip


def random_batch(seed: int = 0, lengths: Sequence[int] = (5, 1, 8, 3), spread: float = 0.4) -> list[Seq]:
    """Several sequences, the second of one token."""
    generator = torch.Generator().manual_seed(seed)
    return [random_seq(n, generator, spread) for n in lengths]


def constant_advantages(batch: Sequence[Seq]) -> list[Seq]:
    """The same with one advantage a sequence, alternating in sign, as group-relative advantages are."""
    return [dataclasses.replace(s, advantages=torch.full_like(s.logp, (1.3, -0.7)[i % 2])) for i, s in enumerate(batch)]


def on_policy(batch: Sequence[Seq]) -> list[Seq]:
    """The same with theta = old = mu = reference, and every label in its support."""
    return [
        dataclasses.replace(
            s,
            old=s.logp,
            mu=s.logp,
            reference=s.logp,
            top_old=s.top_theta,
            top_mu=s.top_theta,
            shift=torch.zeros_like(s.logp),
            inside=torch.ones_like(s.mask),
        )
        for s in batch
    ]


def denominators(batch: Sequence[Seq]) -> Denominators:
    """Counted over the whole mini-batch, as the loop does."""
    return Denominators(float(sum(int(s.mask.sum()) for s in batch)), float(sum(bool(s.mask.any()) for s in batch)), MAX_TOKENS)


class DetachedSegments(LocalSegments):
    """Refuses a gradient through any operation over a sequence: sharded segments could not carry it through their collectives."""

    def _take(self, x_T: Tensor) -> Tensor:
        assert not x_T.requires_grad, "a method sends a gradient through a sum over the sequence"
        return super()._take(x_T)

    def spread(self, x_S: Tensor) -> Tensor:
        assert not x_S.requires_grad
        return super().spread(x_S)


def pack(batch: Sequence[Seq], leaves: Sequence[Tensor], totals: dict[str, Tensor] | None, padding: int, garbage: float) -> Tokens:
    """One micro-batch. `garbage` stands in padding and at tool tokens."""

    def joined(parts: Sequence[Tensor], fill: float) -> Tensor:
        pad = torch.full((padding, *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
        return torch.cat([*parts, pad])

    mask_T = joined([s.mask for s in batch], False)

    def field(name: str) -> Tensor:
        x = joined([getattr(s, name) for s in batch], garbage)
        return torch.where(mask_T if x.ndim == 1 else mask_T[:, None], x, garbage)

    sequence_T = joined([torch.full_like(s.turns, i) for i, s in enumerate(batch)], len(batch))
    segments = DetachedSegments(sequence_T, mask_T, len(batch), joined([s.turns for s in batch], -1))
    logp_T = joined(list(leaves), garbage)
    logp_T = torch.where(mask_T, logp_T, garbage)
    has_label_T = joined([s.has_label for s in batch], True)
    return Tokens.of(
        logp_T, field("old"), field("mu"), field("advantages"), segments, totals,
        behaviour_top_k=TopK(field("top_theta"), field("top_mu"), has_label_T),
        old_top_k=TopK(field("top_theta"), field("top_old"), has_label_T),
        inside_T=joined([s.inside for s in batch], False), kept_mass_T=field("kept_mass"),
        uniform_T=field("uniform"), router_shift_T=field("shift"), reference_logp_T=field("reference"),
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """The loss of a mini-batch and its gradient for each sequence."""

    loss: float
    grads: list[Tensor]
    metrics: dict[str, float]
    clipped_grads: list[Tensor] | None


def evaluate(
    stack: Stack, batch: Sequence[Seq], split: Sequence[Sequence[int]] | None = None, padding: int = 0, garbage: float = float("nan")
) -> Outcome:
    """Runs the pre-pass and the loss as the loop would, over micro-batches of the given sequence indices."""
    split = [range(len(batch))] if split is None else split
    leaves = [s.logp.clone().requires_grad_() for s in batch]

    def micro(indices: Sequence[int], totals: dict[str, Tensor] | None) -> Tokens:
        return pack([batch[i] for i in indices], [leaves[i] for i in indices], totals, padding, garbage)

    totals: dict[str, Tensor] = {}
    if stack.has_statistics:
        for indices in split:
            for key, value in stack.statistics(micro(indices, None)).items():
                assert not value.requires_grad
                totals[key] = totals[key] + value if key in totals else value
    over = denominators(batch)
    answers = [stack.evaluate(micro(indices, totals), over) for indices in split]
    loss = torch.stack([a.loss for a in answers]).sum()
    grads = torch.autograd.grad(loss, leaves, retain_graph=True)
    clipped = None
    if stack.has_clipped_loss:
        clipped = list(torch.autograd.grad(torch.stack([a.clipped_loss for a in answers]).sum(), leaves))  # type: ignore[arg-type,misc]
    metrics = {
        name: float(sum(a.metrics[name][0] for a in answers) / sum(a.metrics[name][1] for a in answers)) for name in answers[0].metrics
    }
    return Outcome(float(loss.detach()), list(grads), metrics, clipped)


def stack(
    objective: str, params: dict | None = None, corrections: Sequence[tuple[str, dict]] = (), aggregation: str | None = None
) -> Stack:
    """A stack from names; `corrections` may hold vocabulary restrictions."""
    restricts = [name in METHODS and METHODS[name].kind == "vocabulary" for name, _ in corrections]
    return registry.build(
        ObjectiveConfig(objective, params or {}, aggregation),  # type: ignore[arg-type]
        [MethodConfig(name, p) for (name, p), restricting in zip(corrections, restricts, strict=True) if not restricting],
        [MethodConfig(name, p) for (name, p), restricting in zip(corrections, restricts, strict=True) if restricting],
    )
