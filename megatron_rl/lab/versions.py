"""Other weights than the checkpoint's, as checkpoint folders: noise on every weight, and weights that went through fewer bits and back.

Quantisation is weight-only: activations, the key-value cache, router, embeddings and output layer stay as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..convert.hf import HfReader, HfWriter
from .config import Quantisation

BLOCK = 128
"""Rows and columns that share a scale in fp8, as DeepSeek-V3's checkpoints have them."""
KEPT = ("embed", "lm_head", "norm", "gate.weight", "router", "bias")
"""Parts of the names of tensors that are not quantised: as modelopt's defaults, which leave the router and the output layer."""

Change = Callable[[str, Tensor], Tensor]
"""(name, tensor) -> what stands in the new folder, in the tensor's dtype."""


def derive(source: str | Path, target: Path, change: Change) -> Path:
    """Writes a checkpoint like `source` with every tensor changed; a folder that exists already is taken as it is.

    The folder appears only when it is whole.
    """
    if target.exists():
        return target
    reader = HfReader(source)
    with HfWriter(target, source) as writer:
        for name in sorted(reader.names()):
            tensor = reader.tensor(name)
            writer.add(name, change(name, tensor).to(tensor.dtype))
    return target


def perturbation(seed: int, version: int, noise: float) -> Change:
    """Adds the noise of versions 1 .. version to each floating-point tensor.

    Args:
        noise: standard deviation of one version's noise, as a share of the tensor's own.
    """

    def change(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.numel() < 2:
            return tensor
        moved, size = tensor.float(), noise * float(tensor.float().std())
        for one in range(1, version + 1):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {one} {name}".encode()))
            moved = moved + size * torch.randn(tensor.shape, generator=generator)
        return moved

    return change


def quantisation(how: Quantisation, quantiser: str = "built-in") -> Change:
    """There and back: int8 with one scale an output channel, or fp8 with one scale a block.

    Args:
        quantiser: who rounds; modelopt has no blocks on CPU, so that fp8 is this package's own.

    Raises:
        ValueError: modelopt is asked for and not installed.
    """
    if how == "fp8":
        back: Callable[[Tensor], Tensor] = fp8_blocks
    else:
        back = int8_channels if quantiser == "built-in" else _modelopt_int8()

    def change(name: str, tensor: Tensor) -> Tensor:
        if tensor.ndim < 2 or not tensor.is_floating_point() or any(part in name for part in KEPT):
            return tensor
        return back(tensor.float())

    return change


def int8_channels(weight: Tensor) -> Tensor:
    """[..., out, in] rounded to 255 levels of max |w| of each output channel, symmetric."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
    return (weight / scale).round().clamp(-127, 127) * scale


def fp8_blocks(weight: Tensor) -> Tensor:
    """[..., out, in] rounded to E4M3 with one scale, max |w| / 448, a block of 128 x 128."""
    rows, columns = weight.shape[-2:]
    out = torch.empty_like(weight)
    for top in range(0, rows, BLOCK):
        for left in range(0, columns, BLOCK):
            here = (..., slice(top, top + BLOCK), slice(left, left + BLOCK))
            block = weight[here]
            scale = block.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 448
            out[here] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return out


def _modelopt_int8() -> Callable[[Tensor], Tensor]:
    try:
        from modelopt.torch.quantization.tensor_quant import fake_tensor_quant
    except ModuleNotFoundError as missing:
        raise ValueError(
            f"quantiser: 'modelopt' needs the package {missing.name}; pip install 'megatron-rl[lab-quant]', or set it to built-in"
        ) from missing

    def back(weight: Tensor) -> Tensor:
        rounded: Tensor = fake_tensor_quant(weight, weight.abs().amax(dim=-1, keepdim=True), None, 8, False, True)
        return rounded

    return back
