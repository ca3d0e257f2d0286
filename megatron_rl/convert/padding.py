"""More attention heads, of zeros, so that tensor parallelism divides them: the same model in more rows and columns.

SmolLM2's 3 key-value heads cannot be divided among 2 ranks. A group of heads whose queries, keys, values and output columns are zero
adds nothing. Engines take a head's width to be hidden_size / num_attention_heads, so the hidden state gets as many more entries, which
stay zero in every layer. An RMS norm's mean is then over more entries: its weights shrink by sqrt(old / new), its epsilon by old / new.
Every added zero has a zero gradient, so training leaves the padding as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from .family import HfTensor, Slot
from .layouts import ModelShape


def padded_config(config: Mapping[str, Any], shape: ModelShape, groups: int) -> dict[str, Any]:
    """config.json with `groups` key-value heads, and as many queries for each as before.

    Raises:
        ValueError: it has more already.
    """
    if groups < shape.groups:
        raise ValueError(f"kv_heads: {groups} must be at least the model's {shape.groups} key-value heads; padding adds heads only")
    heads = shape.heads // shape.groups * groups
    hidden = heads * shape.head_dim
    return {
        **config,
        "num_key_value_heads": groups,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        "rms_norm_eps": config["rms_norm_eps"] * shape.hidden / hidden,
    }


@dataclass(frozen=True)
class Padding:
    """The tensors of the padded model, made from those of the plain one."""

    plain: Callable[[Slot], Sequence[Tensor]]
    """Gives the plain model's."""
    before: ModelShape
    after: ModelShape

    def __call__(self, slot: Slot) -> tuple[Tensor, ...]:
        """One tensor a name in `slot.hf_names`."""
        return tuple(self._pad(row, tensor) for row, tensor in zip(slot.mapping.hf, self.plain(slot), strict=True))

    def _pad(self, row: HfTensor, tensor: Tensor) -> Tensor:
        if self.before == self.after:
            return tensor
        old, new = self.before.resolve(row.shape), self.after.resolve(row.shape)
        if row.shape == ("hidden",):
            tensor = (tensor.double() * math.sqrt(self.before.hidden / self.after.hidden)).to(tensor.dtype)
        # functional.pad counts axes from the last.
        return functional.pad(tensor, [n for a, b in zip(reversed(old), reversed(new), strict=True) for n in (0, b - a)])
