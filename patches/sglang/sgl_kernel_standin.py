"""What SGLang's CPU path needs from ``sgl_kernel``, whose CPU build is not on PyPI: one function, in plain torch.

``standins.install`` serves this module under the name ``sgl_kernel`` where no real one is installed and CUDA is absent.
Every other kernel name resolves to a function that raises when called, because SGLang imports several names it never calls.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write freshly allocated cache slots into the request-to-token table, in place.

    Args:
        req_pool_indices: [B] int, the table row of each request.
        req_to_token: [R, pool_len] int32, the table.
        start_offset, end_offset: [B] int, the half-open range of positions to fill in each row.
        out_cache_loc: [sum(end - start)] int, the slots, request after request.
        pool_len: row length of the table.
    """
    assert req_to_token.shape[1] == pool_len
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    # Kernels are lower-case functions. Anything else (dunders, classes, sub-modules' constants) stays a plain
    # AttributeError, so that SGLang's own "is it there?" probes keep answering no.
    if name.startswith("_") or not name.islower():
        raise AttributeError(f"module 'sgl_kernel' (CPU stand-in) has no attribute {name!r}")

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU stand-in in megatron_rl_patches. Use flags that avoid it "
            "(--attention-backend torch_batched --sampling-backend pytorch), or install a real sgl_kernel CPU build."
        )

    missing.__name__ = name
    return missing
