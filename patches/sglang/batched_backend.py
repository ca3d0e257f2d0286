"""The class behind ``--attention-backend torch_batched``. Imports SGLang, so only ``attention_backend`` imports it, late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from .attention_backend import NAME
from .batched_attention import Group, attend, plan_decode, plan_extend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TorchBatchedAttnBackend(TorchNativeAttnBackend):
    """SGLang's torch_native backend with the two per-request loops replaced; all else, and what is rare, is the parent's.

    Cross attention, encoder-only attention and sliding windows take the parent's loop.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        """Raises ``ValueError`` where the server was started with pages of more than one token."""
        super().__init__(model_runner)
        if model_runner.page_size != 1:
            # SGLang picks its allocation kernels by backend name, and for pages it would pick Triton ones for ours.
            raise ValueError(f"--page-size is {model_runner.page_size}, but --attention-backend {NAME} needs --page-size 1")
        self._plan: list[Group] | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the groups of this forward pass; its layers share them."""
        super().init_forward_metadata(forward_batch)
        self._plan = None
        table, rows = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
        if forward_batch.encoder_lens is not None or forward_batch.batch_size == 0:
            return
        if forward_batch.forward_mode.is_decode():
            self._plan = plan_decode(table, rows, forward_batch.seq_lens.tolist())
        elif forward_batch.forward_mode.is_extend() and forward_batch.extend_prefix_lens is not None:
            self._plan = plan_extend(table, rows, forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens.tolist())

    def _run_sdpa_forward_decode(self, query: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._is_planned(kwargs):
            return super()._run_sdpa_forward_decode(query, output, *args, **kwargs)
        return self._run_plan(query, output, args[0], args[1], kwargs["scaling"])

    def _run_sdpa_forward_extend(self, query: torch.Tensor, output: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs["causal"] or not self._is_planned(kwargs):
            return super()._run_sdpa_forward_extend(query, output, *args, **kwargs)
        return self._run_plan(query, output, args[0], args[1], kwargs["scaling"])

    def _is_planned(self, options: dict[str, Any]) -> bool:
        return self._plan is not None and not options["is_cross_attn"] and options["sliding_window_size"] is None

    def _run_plan(
        self, query_THD: torch.Tensor, out_THD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        assert self._plan is not None
        for group in self._plan:
            attend(group, query_THD, key_NKD, value_NKD, scale, out_THD)
        return out_THD
