"""The checksums that SGLang's /weights_checker reports, computed from the trainer's tensors.

SGLang 0.5.23 hashes each parameter as it holds it: query, key and value joined, gate and up joined, and all experts of a layer in
two tensors, `w13_weight` [E, 2 I, H] (gate over up) and `w2_weight` [E, H, I]. On CPU the hash is the first 8 bytes of SHA-256 over
the bytes (sglang/srt/managers/mm_utils.py, tensor_hash); on CUDA it is a Triton kernel's, which is not repeated here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
PART_OF = {part: joined for joined, parts in JOINED.items() for part in parts}
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
LINEAR = re.compile(r"(.+)\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$")


def tensor_hash(parts: Iterable[Tensor]) -> str:
    """16 hex digits over the parts' bytes, end to end."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()[:8].hex()


class Checksums:
    """Collects weights as they pass by and hashes each engine tensor as soon as its parts are there.

    Args:
        experts: of the model; 0 for a dense one.
    """

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._waiting: dict[str, dict[int, Tensor]] = {}
        self._hashes: dict[str, str] = {}

    def observe(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Passes the weights on, having noted each."""
        for name, tensor in weights:
            self._add(name, tensor)
            yield name, tensor

    def difference(self, engine: Mapping[str, str]) -> str | None:
        """What differs from the engine's checksums by name; None if nothing does."""
        assert not self._waiting, f"parts are missing of {sorted(self._waiting)[:3]}"
        alone = sorted(set(engine) ^ set(self._hashes))
        if alone:
            return f"tensors that only one side has: {alone[:5]}"
        wrong = sorted(name for name, value in engine.items() if value != self._hashes[name])
        return f"{len(wrong)} of {len(engine)} tensors differ, among them {wrong[:5]}" if wrong else None

    def _add(self, name: str, tensor: Tensor) -> None:
        target, index, parts = self._place(name)
        waiting = self._waiting.setdefault(target, {})
        waiting[index] = tensor
        if len(waiting) == parts:
            self._hashes[target] = tensor_hash(waiting[i] for i in sorted(waiting))
            del self._waiting[target]

    def _place(self, name: str) -> tuple[str, int, int]:
        """(the engine's tensor, place in it, how many parts it has)."""
        expert = EXPERT.match(name)
        if expert:
            prefix, number, kind = expert[1], int(expert[2]), expert[3]
            if kind == "down":
                return f"{prefix}.w2_weight", number, self._experts
            return f"{prefix}.w13_weight", 2 * number + (kind == "up"), 2 * self._experts
        linear = LINEAR.match(name)
        if linear:
            joined = PART_OF[linear[2]]
            return f"{linear[1]}.{joined}.{linear[3]}", JOINED[joined].index(linear[2]), len(JOINED[joined])
        return name, 0, 1
