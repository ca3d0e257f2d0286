"""Whether two checkpoints are the same model: every tensor, then logits and routes on given prompts.

Each of both may be a Hugging Face folder or a Megatron checkpoint, of any layout. Tensors are compared one at a time under the names
of the family's table, so that fused and single experts, and any sharding, compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import ParallelConfig
from ..data.jsonl import read_rows
from .forward import Answer
from .inspection import Difference
from .layouts import raw
from .session import processes
from .sides import Side, open_side

BOUND = 1e-4
"""Default for the largest difference of a logit, as a share of the largest |logit|: fp32 sums in another order, over deep models."""


@dataclass(frozen=True)
class WeightsReport:
    """Every tensor of the table, which both sides have exactly once and in the same shape, or opening them would have failed."""

    tensors: int
    parameters: int
    checksums: tuple[str, str]
    """SHA-256 over names, dtypes, shapes and values of all tensors, in the table's order."""
    rounded: int
    """Tensors whose dtypes differ, and whose values are equal in the narrower one."""
    different: tuple[Difference, ...]


@dataclass(frozen=True)
class LogitsReport:
    """Logits of both sides in fp32, a list a prompt, a number a position."""

    engines: tuple[str, str]
    max_abs: tuple[tuple[float, ...], ...]
    mean_abs: tuple[tuple[float, ...], ...]
    largest_logit: float
    routes_agreement: tuple[float, ...]
    """For each layer that routes, by depth: the share of tokens that both sides send to the same experts."""

    @property
    def share(self) -> float:
        """The largest difference over the largest |logit|."""
        every = torch.tensor([position for prompt in self.max_abs for position in prompt])
        return float(every.max()) / max(self.largest_logit, 1e-30)  # torch's max, which does not lose a nan


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    weights: WeightsReport
    logits: LogitsReport | None
    bound: float

    @property
    def passed(self) -> bool:
        """Whether tensors are equal but for rounding, and logits within the bound."""
        return not self.weights.different and (self.logits is None or self.logits.share <= self.bound)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        logits = None if self.logits is None else {**asdict(self.logits), "share": self.logits.share}
        return {"passed": self.passed, "bound": self.bound, "weights": asdict(self.weights), "logits": logits}


def verify(
    a: str, b: str, prompts: str | None = None, *, hf_template: str | None = None, tokenizer: str | None = None, bound: float = BOUND
) -> Report:
    """Compares two checkpoints, one tensor at a time; then, with prompts, both models one after the other, each in memory as a whole.

    Args:
        a, b: Hugging Face folders or Megatron checkpoints.
        prompts: a file of JSON lines, {"prompt": text} or {"tokens": [ids]}; None compares tensors only.
        hf_template: holds config.json, for checkpoints that have none.
        tokenizer: a folder with one, for prompts of text; None takes that of the Hugging Face folders that were given.
        bound: see `BOUND`.

    Raises:
        ValueError: a checkpoint is unsupported or damaged, or they are of models of different families or sizes.
    """
    with processes(ParallelConfig()) as mesh:
        if mesh.world_size > 1:
            raise ValueError("verify: runs in one process; start it without torchrun")
        sides = open_side(a, hf_template, mesh), open_side(b, hf_template, mesh)
        if sides[0].family is not sides[1].family or sides[0].shape != sides[1].shape:
            raise ValueError(f"{a} and {b}: are models of different families or sizes; compare two of the same")
        weights = compare_weights(*sides)
        if prompts is None:
            return Report(weights, None, bound)
        sequences = list(_sequences(prompts, [tokenizer, hf_template, a, b], sides[0].shape.vocab))
        first, second = (side.answers(sequences, mesh) for side in sides)
        return Report(weights, compare_answers((sides[0].engine, sides[1].engine), first, second), bound)


def compare_weights(a: Side, b: Side) -> WeightsReport:
    """Every tensor of both, in the table's order."""
    sums = hashlib.sha256(), hashlib.sha256()
    tensors = parameters = rounded = 0
    different = []
    for slot in a.family.slots(a.shape):
        for name, *pair in zip(slot.hf_names, a.tensors(slot), b.tensors(slot), strict=True):
            mine, other = (tensor.contiguous() for tensor in pair)
            tensors, parameters = tensors + 1, parameters + mine.numel()
            for digest, tensor in zip(sums, (mine, other), strict=True):
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                digest.update(raw(tensor))
            if mine.dtype != other.dtype and _equal_when_rounded(mine, other):
                rounded += 1
            elif mine.dtype != other.dtype or not torch.equal(mine, other):
                dtypes = (str(mine.dtype).removeprefix("torch."), str(other.dtype).removeprefix("torch."))
                different.append(Difference(name, dtypes, float((mine.float() - other.float()).abs().max())))
    return WeightsReport(tensors, parameters, (sums[0].hexdigest(), sums[1].hexdigest()), rounded, tuple(different))


def _equal_when_rounded(a: Tensor, b: Tensor) -> bool:
    narrower = min((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
    return a.dtype.itemsize != b.dtype.itemsize and torch.equal(a.to(narrower), b.to(narrower))


def compare_answers(engines: tuple[str, str], first: Sequence[Answer], second: Sequence[Answer]) -> LogitsReport:
    """Position by position, and layer by layer."""
    off = [(x.logits_TV - y.logits_TV).abs() for x, y in zip(first, second, strict=True)]
    alike = [
        (x.routes_TLK == y.routes_TLK).all(-1) for x, y in zip(first, second, strict=True) if x.routes_TLK is not None is not y.routes_TLK
    ]
    return LogitsReport(
        engines=engines,
        max_abs=tuple(tuple(d_TV.amax(1).tolist()) for d_TV in off),
        mean_abs=tuple(tuple(d_TV.mean(1).tolist()) for d_TV in off),
        largest_logit=max(float(answer.logits_TV.abs().max()) for answer in (*first, *second)),
        routes_agreement=tuple(torch.cat(alike).double().mean(0).tolist()) if alike else (),
    )


def _sequences(prompts: str, places: Sequence[str | None], vocab: int) -> Iterator[list[int]]:
    """Token ids of each line."""
    tokenizer: Any = None
    for number, row in read_rows(prompts, ()):
        where = f"{prompts}:{number}"
        if "tokens" in row:
            tokens = row["tokens"]
        elif isinstance(row.get("prompt"), str):
            tokenizer = tokenizer or _tokenizer(places)
            tokens = tokenizer(row["prompt"])["input_ids"]
        else:
            raise ValueError(f'{where}: {row!r} is neither {{"prompt": text}} nor {{"tokens": [ids]}}')
        if not isinstance(tokens, list) or not tokens or not all(isinstance(t, int) and 0 <= t < vocab for t in tokens):
            raise ValueError(f"{where}: {tokens!r} is no list of token ids from 0 to {vocab - 1}")
        yield tokens


def _tokenizer(places: Sequence[str | None]) -> Any:
    from ..data.prompts import load_tokenizer

    for place in places:
        if place is not None and (Path(place) / "tokenizer.json").is_file():
            return load_tokenizer(place)
    raise ValueError("tokenizer: none of the given folders has a tokenizer.json; give --tokenizer, a folder with one")
