"""A copy of everything a rejected step must not leave behind: weights, optimizer, loss scaling, random states. Restored bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import MegatronModel
from .optimizer import parts
from .randomness import random_states, restore_random_states


@dataclass(frozen=True)
class Snapshot:
    """This rank's share of a model as it was. Kept in host memory (pinned where there is a GPU)."""

    tensors: list[Tensor]
    """Parameters, then fp32 masters, in the order of `_tensors`."""
    optimizers: list[dict[str, Any]]
    random: dict[str, Any]


def take(model: MegatronModel) -> Snapshot:
    """Copies this rank's share. No communication."""
    assert model.optimizer is not None
    return Snapshot(
        tensors=[_to_host(t) for t in _tensors(model)],
        optimizers=[_optimizer_state(part) for part in parts(model.optimizer)],
        random=random_states(),
    )


@torch.no_grad()
def restore(model: MegatronModel, snapshot: Snapshot) -> None:
    """Puts everything back, in place: views that Megatron holds of its buffers stay valid. No communication."""
    for tensor, before in zip(_tensors(model), snapshot.tensors, strict=True):
        tensor.copy_(before)
    for part, state in zip(parts(model.optimizer), snapshot.optimizers, strict=True):
        _restore_optimizer(part, state)
    restore_random_states(snapshot.random)


def _to_host(x: Tensor) -> Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return host.copy_(x.detach())


def _tensors(model: MegatronModel) -> Iterator[Tensor]:
    for chunk in model.chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()
    for part in parts(model.optimizer):
        for group in part.optimizer.param_groups:
            yield from group["params"]


def _optimizer_state(part: Any) -> dict[str, Any]:
    moments = {
        id(parameter): {name: _to_host(v) if isinstance(v, Tensor) else v for name, v in state.items()}
        for parameter, state in part.optimizer.state.items()
    }
    groups = [copy.deepcopy({name: v for name, v in group.items() if name != "params"}) for group in part.optimizer.param_groups]
    scaler = part.grad_scaler.state_dict() if getattr(part, "grad_scaler", None) is not None else None
    return {"moments": moments, "groups": groups, "scaler": copy.deepcopy(scaler)}


def _restore_optimizer(part: Any, saved: dict[str, Any]) -> None:
    state = part.optimizer.state
    for parameter in list(state):
        before = saved["moments"].get(id(parameter))
        if before is None:
            del state[parameter]
            continue
        for name, value in before.items():
            if isinstance(value, Tensor):
                state[parameter][name].copy_(value)
            else:
                state[parameter][name] = value
    for group, before in zip(part.optimizer.param_groups, saved["groups"], strict=True):
        group.update(copy.deepcopy(before))
    if saved["scaler"] is not None:
        part.grad_scaler.load_state_dict(saved["scaler"])
