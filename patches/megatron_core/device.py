"""torch.cuda as Megatron uses it, answered by the CPU. `torch.cuda.is_available()` stays False."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..core import Anchor, Patch
from .version import MEGATRON_CORE, TESTED

CPU = torch.device("cpu")


class CpuEvent:
    """`torch.cuda.Event` where work is done when the call returns: nothing to record, nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class CpuStream:
    """`torch.cuda.Stream` where there is one queue, the Python thread, so streams never need ordering."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else CpuEvent()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority, as `torch.cuda.Stream.priority_range()`."""
        return 0, 0


def install_cuda_facade() -> None:
    """Answer the stream, event and device calls of torch.cuda with the CPU."""
    the_stream = CpuStream()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU  # a torch.device, so `device=torch.cuda.current_device()` needs no further help
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.current_stream = lambda device=None: the_stream
    cuda.default_stream = lambda device=None: the_stream
    cuda.Stream, cuda.Event = CpuStream, CpuEvent
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *args: None
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda self, stream: None


CUDA_FACADE = Patch(
    name="cuda-facade",
    dependency=MEGATRON_CORE,
    reason="Megatron asks torch.cuda for the device, streams and events without looking whether there is CUDA; each call raises.",
    upstream="none",
    versions=TESTED,
    removal="megatron.core asks torch.accelerator (or takes a device), not torch.cuda",
    anchors=(
        Anchor("tensor_parallel/mappings.py", r"device=torch\.cuda\.current_device\(\)"),
        Anchor("transformer/moe/token_dispatcher.py", r"torch\.cuda\.Stream\("),
        Anchor("transformer/moe/token_dispatcher.py", r"torch\.cuda\.current_stream\(\)"),
        Anchor("pipeline_parallel/p2p_communication.py", r"torch\.cuda\.synchronize\(\)"),
    ),
    apply=install_cuda_facade,
)
