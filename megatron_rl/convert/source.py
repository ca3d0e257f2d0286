"""A Hugging Face folder seen through a family's table. Knows nothing of Megatron."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .family import Family
from .hf import HfReader
from .layouts import ModelShape, Shape
from .quantised import SCALE, block_size, dequantise, scale_shape

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


class Source:
    """A checkpoint under the names of the family's table, however its writer stored experts or scaled weights; checked as a whole first.

    Where the family allows extra layers, those beyond the model's are not read.

    Raises (on construction):
        ValueError: a tensor is missing, left over, there twice or of another shape.
    """

    def __init__(self, reader: HfReader, family: Family, shape: ModelShape) -> None:
        self._reader = reader
        self._fused: dict[str, tuple[str, int, int, int]] = {}
        expected = {name: size for slot in family.slots(shape) for name, size in zip(slot.hf_names, slot.hf_shapes(shape), strict=True)}
        layers = shape.layers if family.extra_layers else None
        present = {name: reader.shape(name) for name in reader.names() if not _beyond(name, layers)}
        self._block = block_size(reader.config)
        self._scaled = self._take_scales(present)
        if shape.tied:
            # Some writers repeat the embedding; transformers reads it from the embedding alone.
            present.pop("lm_head.weight", None)
        self._split_fused(family, shape, expected, present)
        for name in sorted(expected.keys() - present.keys()):
            raise ValueError(f"{reader.folder}: tensor {name} is missing{_others(len(expected.keys() - present.keys()))}")
        for name in sorted(present.keys() - expected.keys()):
            raise ValueError(f"{reader.folder}: tensor {name} does not belong to a {family.name} model of this config.json")
        for name, size in expected.items():
            if present[name] != size:
                raise ValueError(f"{reader.folder}: tensor {name} has shape {present[name]}, but config.json makes it {size}")

    def _take_scales(self, present: dict[str, Shape]) -> frozenset[str]:
        """The weights that have scales; these are removed from `present`."""
        if self._block is None:
            return frozenset()
        scaled = frozenset(name.removesuffix(SCALE) for name in present if name.endswith(SCALE))
        for name in sorted(scaled):
            found, weight = present.pop(name + SCALE), present.get(name, ())
            if len(weight) != 2:
                raise ValueError(f"{self._reader.folder}: tensor {name + SCALE} has no matrix {name} to scale")
            if found != (wanted := scale_shape(weight, self._block)):
                raise ValueError(f"{self._reader.folder}: tensor {name + SCALE} has shape {found}, but its weight makes it {wanted}")
        return scaled

    def _split_fused(self, family: Family, shape: ModelShape, expected: Mapping[str, Shape], present: dict[str, Shape]) -> None:
        """Replaces each fused tensor in `present` by the tensors that it stands for."""
        for fused in family.fused_experts:
            for layer in range(shape.layers):
                name = fused.name.format(layer=layer)
                sizes = [expected[plain] for part in fused.parts if (plain := part.format(layer=layer, expert=0)) in expected]
                if name not in present or not sizes:
                    continue
                rows = [size[0] for size in sizes]
                wanted = (shape.experts, sum(rows), *sizes[0][1:])
                if present[name] != wanted:
                    raise ValueError(f"{self._reader.folder}: tensor {name} has shape {present[name]}, but config.json makes it {wanted}")
                del present[name]
                for expert in range(shape.experts):
                    for index, part in enumerate(fused.parts):
                        plain = part.format(layer=layer, expert=expert)
                        if plain in present:
                            raise ValueError(f"{self._reader.folder}: tensor {plain} is there twice, by itself and in {name}")
                        present[plain] = expected[plain]
                        self._fused[plain] = (name, expert, sum(rows[:index]), rows[index])

    def tensor(self, name: str) -> Tensor:
        """One tensor by the table's name."""
        if name not in self._fused:
            tensor = self._reader.tensor(name)
            if name in self._scaled:
                assert self._block is not None
                return dequantise(tensor, self._reader.tensor(name + SCALE), self._block)
            if tensor.dtype == torch.float8_e4m3fn:
                raise ValueError(f"{self._reader.folder}: tensor {name} is in float8 and has no {SCALE} tensor beside it")
            return tensor
        fused, expert, start, count = self._fused[name]
        return self._reader.tensor(fused, expert)[start : start + count]


def _beyond(name: str, layers: int | None) -> bool:
    """Whether a tensor belongs to a layer after the first `layers`."""
    found = _LAYER.match(name)
    return layers is not None and found is not None and int(found.group(1)) >= layers


def _others(missing: int) -> str:
    return f" (and {missing - 1} more)" if missing > 1 else ""
