"""`device="cuda"` and pinned memory, written as literals in Megatron: they mean the CPU.

Only calls whose caller is a Megatron module are redirected; anybody else's `device="cuda"` fails as torch has it fail. The caller is
looked up only after a CUDA device or pinned memory was seen, so an ordinary call pays for one Python function and two dict look-ups.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins as jit_builtins
from torch.utils import _device as torch_device

from ..core import Anchor, Patch
from .device import CPU
from .version import MEGATRON_CORE, TESTED, V0_16

# Every factory that a module of megatron.core outside inference, export and FSDP calls with a CUDA literal or pin_memory.
FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")


def is_megatron(frame: Any) -> bool:
    """Whether the code of `frame` is a module of Megatron."""
    return frame.f_globals.get("__name__", "").startswith("megatron.")


def _asks_for_cuda(options: dict[str, Any]) -> bool:
    device = options.get("device")
    is_cuda = device.startswith("cuda") if isinstance(device, str) else isinstance(device, torch.device) and device.type == "cuda"
    return is_cuda or bool(options.get("pin_memory"))


def _redirected(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        # The first two tests are only for speed: no options, or an explicit CPU device, is what nearly every call has.
        if (
            kwargs
            and (kwargs.get("device", CPU) != CPU or "pin_memory" in kwargs)
            and _asks_for_cuda(kwargs)
            and is_megatron(sys._getframe(1))
        ):
            kwargs = {**kwargs, "device": CPU, "pin_memory": False}
        return factory(*args, **kwargs)

    return on_cpu


def _cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.cuda`: the tensor itself for Megatron, torch's own error for anybody else."""
    return self if is_megatron(sys._getframe(1)) else _torch_cuda(self, *args, **kwargs)


def _pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.pin_memory`: the tensor itself for Megatron (there is no GPU to copy to from pinned memory)."""
    return self if is_megatron(sys._getframe(1)) else _torch_pin_memory(self, *args, **kwargs)


_torch_cuda, _torch_pin_memory = torch.Tensor.cuda, torch.Tensor.pin_memory


def redirect_cuda_literals() -> None:
    """Replace the factories that Megatron calls with CUDA literals, `Tensor.cuda` and `Tensor.pin_memory`."""
    # `with torch.device(...)` recognises factories by identity, in a table it builds when first asked: build it with torch's own.
    torch_device._device_constructors()
    for name in FACTORIES:
        original = getattr(torch, name)
        replacement = _redirected(original)
        # TorchScript finds builtins by identity: without this, scripting code that calls torch.zeros would fail.
        jit_builtins._register_builtin(replacement, jit_builtins._find_builtin(original))
        setattr(torch, name, replacement)
    tensor: Any = torch.Tensor
    tensor.cuda, tensor.pin_memory = _cuda, _pin_memory


CUDA_LITERALS = Patch(
    name="cuda-literals",
    dependency=MEGATRON_CORE,
    reason='Megatron creates tensors with device="cuda", .cuda() and pin_memory=True; each raises in a torch without CUDA.',
    upstream="none",
    versions=TESTED,
    removal="megatron.core has no CUDA literals outside GPU-only modules",
    anchors=(
        Anchor("pipeline_parallel/schedules.py", r'torch\.zeros\(\[\], dtype=torch\.int, device="cuda"\)'),
        Anchor("optimizer/clip_grads.py", r"torch\.tensor\(\[float\(total_norm\)\], dtype=torch\.float, device='cuda'\)"),
        Anchor("dist_checkpointing/exchange_utils.py", r'torch\.empty_like\(tensor, device="cuda"\)'),
        Anchor("transformer/utils.py", r'torch\.ones\(sq, sq, device="cuda"\)'),
        Anchor("dist_checkpointing/exchange_utils.py", r'torch\.empty\(0, dtype=dtype, device="cuda"\)'),
        Anchor("models/common/embeddings/rope_utils.py", r'device="cpu", pin_memory=True'),
        Anchor("distributed/param_and_grad_buffer.py", r"\.pin_memory\(\)", (V0_16,)),
        Anchor("dist_checkpointing/exchange_utils.py", r"\.cuda\(\)"),
    ),
    apply=redirect_cuda_literals,
)
