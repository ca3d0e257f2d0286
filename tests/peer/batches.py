"""Random mini-batches, and what a peer makes of one: its loss and the gradient at every sequence's log-probs.

Legend: B sequences, T positions of the longest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_rl.methods.stack import Stack

from .ours import Outcome, Seq, evaluate

HOW_TO_INSTALL = "bash tools/peer_env.sh makes an environment that has it"

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5}
"""Relative and absolute."""


@dataclass(frozen=True)
class Padded:
    """A mini-batch as the peers want it, [B, T]. Padding and tool tokens hold ordinary numbers, which must not matter."""

    logp: Tensor
    """Carries the gradient."""
    old: Tensor
    mu: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor
    """Of the log-probs' dtype."""


PeerLoss = Callable[[Padded], Tensor]


def padded(batch: Sequence[Seq], leaves: Sequence[Tensor] | None = None) -> Padded:
    """Right-padded, each field with another value in the padding, so that what leaks out of it shows."""

    def field(name: str, fill: float) -> Tensor:
        return pad_sequence([getattr(s, name) for s in batch], batch_first=True, padding_value=fill)

    logp = pad_sequence([s.logp for s in batch] if leaves is None else list(leaves), batch_first=True, padding_value=-3.0)
    mask = pad_sequence([s.mask for s in batch], batch_first=True, padding_value=False).to(logp.dtype)
    return Padded(logp, field("old", -2.5), field("mu", -0.5), field("reference", -1.5), field("advantages", 0.7), mask)


def peer_outcome(loss: PeerLoss, batch: Sequence[Seq]) -> tuple[float, list[Tensor]]:
    """The peer's loss and its gradient for each sequence."""
    leaves = [s.logp.clone().requires_grad_() for s in batch]
    value = loss(padded(batch, leaves))
    return float(value.detach()), list(torch.autograd.grad(value, leaves))


def assert_same(ours: Stack, theirs: PeerLoss, batch: Sequence[Seq], tolerance: float = 0.0) -> Outcome:
    """Loss and gradient agree, to rounding or to `tolerance` if that is larger; answers ours."""
    outcome = evaluate(ours, batch)
    loss, grads = peer_outcome(theirs, batch)
    tolerance = max(tolerance, TOLERANCE[batch[0].logp.dtype])
    torch.testing.assert_close(outcome.loss, loss, rtol=tolerance, atol=tolerance)
    for mine, yours in zip(outcome.grads, grads, strict=True):
        torch.testing.assert_close(mine, yours, rtol=tolerance, atol=tolerance)
    return outcome


def one(
    logp: Sequence[float],
    old: Sequence[float],
    mu: Sequence[float] | None = None,
    advantage: float = 1.0,
    mask: Sequence[bool] | None = None,
) -> Seq:
    """A sequence written out, in fp64, its own reference; mu is old unless given."""
    theta, base, behaviour = (torch.tensor(list(v), dtype=torch.float64) for v in (logp, old, old if mu is None else mu))
    on = torch.ones_like(theta, dtype=torch.bool) if mask is None else torch.tensor(list(mask))
    return Seq(theta, base, behaviour, theta.clone(), torch.full_like(theta, advantage), on)


def to(batch: Sequence[Seq], dtype: torch.dtype) -> list[Seq]:
    """The same in another floating dtype."""
    names = ("logp", "old", "mu", "reference", "advantages")
    return [dataclasses.replace(s, **{name: getattr(s, name).to(dtype) for name in names}) for s in batch]


@st.composite
def batches(
    draw: st.DrawFn, *, token_advantages: bool = False, far: float = 18.0, dtypes: Sequence[torch.dtype] = tuple(TOLERANCE)
) -> list[Seq]:
    """One to four sequences of one to six tokens, some of them tools', at least one not.

    Log-probs are multiples of 0.01 nats, so that a failure is readable and no ratio lies on a threshold. A token of theta or of old is
    near its neighbour policy or anywhere down to -`far` nats, so no log-ratio passes +-`far`. Advantages of both signs and 0, one a
    sequence or one a token.
    """
    lowest = -round(100 * far)

    def moved(start: int) -> int:
        near = draw(st.integers(0, 3)) > 0
        return max(min(start + draw(st.integers(-40, 40)), -1), lowest) if near else draw(st.integers(lowest, -1))

    def nats(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64) / 100

    batch = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 6))
        mu = [draw(st.integers(max(-300, lowest), -1)) for _ in range(length)]
        old = [moved(x) for x in mu]
        theta = [moved(x) for x in old]
        reference = [moved(x) for x in theta]
        mask = [draw(st.booleans()) for _ in range(length)]
        mask[draw(st.integers(0, length - 1))] = True
        tenths = [draw(st.integers(-20, 20)) for _ in range(length if token_advantages else 1)]
        advantages = (torch.tensor(tenths, dtype=torch.float64) / 10).expand(length).clone()
        batch.append(Seq(nats(theta), nats(old), nats(mu), nats(reference), advantages, torch.tensor(mask)))
    return to(batch, draw(st.sampled_from(list(dtypes))))
