"""Checkpoints whose weights are stored in fewer bits: block-scaled FP8 (DeepSeek-V3's) is read, everything else is refused by name.

A weight [R, C] in float8_e4m3 comes with `weight_scale_inv` in fp32, one number a block of (by default) 128 x 128; value x scale is
the weight. There is no way back: exports are in the trainer's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .layouts import Shape

SCALE = "_scale_inv"
"""Added to a weight's name, it is the name of its scales."""

_METHOD_FIELDS = frozenset(
    {"quant_method", "activation_scheme", "fmt", "scale_fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers", "dequantize"}
)


def check_quantisation(config: Mapping[str, Any]) -> None:
    """Raises ValueError unless config.json's weights are plain or block-scaled FP8."""
    given = config.get("quantization_config")
    if given is None:
        return
    method = given.get("quant_method")
    remedy = "only block-scaled fp8 is read; give a checkpoint in bfloat16"
    if method != "fp8" or not given.get("weight_block_size"):
        how = f"{method!r}" if method != "fp8" else "'fp8' without weight_block_size"
        raise ValueError(f"config.json: quantization_config: quant_method {how} is not supported; {remedy}")
    if given.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"config.json: quantization_config: fmt = {given['fmt']!r} is not supported; only 'e4m3'")
    if unknown := sorted(given.keys() - _METHOD_FIELDS):
        raise ValueError(f"config.json: quantization_config: {unknown} are unknown and may change what the weights are")


def block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where weights are plain."""
    given = config.get("quantization_config")
    if given is None:
        return None
    rows, columns = given["weight_block_size"]
    return rows, columns


def scale_shape(weight: Shape, block: tuple[int, int]) -> Shape:
    """Shape of a weight's scales; blocks at the edges may be cut short."""
    return tuple(-(-size // step) for size, step in zip(weight, block, strict=True))


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """fp32 [R, C] of a weight [R, C] in float8_e4m3 and its scales [ceil(R / block), ceil(C / block)]."""
    rows, columns = weight.shape
    each = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.to(torch.float32) * each
