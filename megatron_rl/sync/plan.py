"""How weights are cut into broadcasts and named for the engine. Pure: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NamedTensor = tuple[str, Tensor]

KEEP_FP32 = ("e_score_correction_bias",)
"""Name endings of weights that engines hold in fp32 whatever their dtype: a rounded expert bias would route otherwise."""


@dataclass(frozen=True)
class Bucket:
    """Weights of one dtype that travel in one broadcast."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    flat: Tensor
    """uint8 [bytes]: the weights end to end, each contiguous, in the order of `names`."""

    def request(self) -> Mapping[str, Any]:
        """What SGLang's /update_weights_from_distributed must know to cut `flat` up again (its load format flattened_bucket)."""
        return {
            "names": list(self.names),
            "dtypes": [str(self.dtype).removeprefix("torch.")] * len(self.names),
            "shapes": [list(shape) for shape in self.shapes],
            "load_format": "flattened_bucket",
        }


def cast(weights: Iterable[NamedTensor], dtype: torch.dtype) -> Iterator[NamedTensor]:
    """The weights as the engine holds them: detached, contiguous, in `dtype`, except those of KEEP_FP32."""
    for name, tensor in weights:
        wanted = torch.float32 if name.endswith(KEEP_FP32) else dtype
        yield name, tensor.detach().to(wanted).contiguous()


def buckets(weights: Iterable[NamedTensor], limit: int) -> Iterator[Bucket]:
    """Cuts a stream of weights into buckets of at most `limit` bytes, in order; a larger weight gets a bucket of its own.

    One dtype a bucket keeps every weight aligned. At most one bucket is held at a time.
    """
    held: list[NamedTensor] = []
    size = 0
    for name, tensor in weights:
        if held and (size + tensor.nbytes > limit or tensor.dtype != held[0][1].dtype):
            yield _bucket(held)
            held, size = [], 0
        held.append((name, tensor))
        size += tensor.nbytes
    if held:
        yield _bucket(held)


def _bucket(held: list[NamedTensor]) -> Bucket:
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in held])
    return Bucket(tuple(name for name, _ in held), tuple(tuple(tensor.shape) for _, tensor in held), held[0][1].dtype, flat)


def mark_last(items: Iterable[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Each bucket with whether it is the last one."""
    stream = iter(items)
    try:
        current = next(stream)
    except StopIteration:
        return
    for following in stream:
        yield current, False
        current = following
    yield current, True
