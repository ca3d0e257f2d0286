"""Attention over packed sequences where Transformer Engine is absent (CPU, or a GPU without it).

Megatron's local attention refuses packed sequences. This one takes the same `thd` layout and `PackedSeqParams` as Transformer
Engine's, unpacks the sequences into a right-padded batch, and lets torch's fused scaled-dot-product attention do the work. Padding
on the right needs no mask: a causal query never looks at a later key.

Legend: T positions of the pack, S sequences, C the longest sequence, H heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class PackedAttention(MegatronModule):
    """Core attention for Megatron's `SelfAttention`: causal within each packed sequence, grouped queries, no dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"parallel.context: {config.context_parallel_size} needs Transformer Engine's attention; without it use parallel.context 1"
            )
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal) and attention_type == "self"
        assert (config.attention_dropout if attention_dropout is None else attention_dropout) == 0.0
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> Tensor:
        """query [T, H, D], key and value [T, H_kv, D] -> [T, H * D]."""
        assert packed_seq_params is not None and attention_bias is None, "PackedAttention only takes packed (thd) sequences"
        row_T, column_T, sequences, longest = _slots(packed_seq_params.cu_seqlens_q, query.shape[0])

        def unpack(x_THD: Tensor) -> Tensor:
            padded_SCHD = x_THD.new_zeros(sequences, longest, *x_THD.shape[1:])
            return padded_SCHD.index_put((row_T, column_T), x_THD).transpose(1, 2)

        out_SHCD = torch.nn.functional.scaled_dot_product_attention(
            unpack(query),
            unpack(key),
            unpack(value),
            is_causal=True,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out_SHCD.transpose(1, 2)[row_T, column_T].reshape(query.shape[0], -1)


def _slots(cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor, int, int]:
    """For each position its (sequence, offset), then the number of sequences and the longest length."""
    lengths_S = cu_seqlens[1:] - cu_seqlens[:-1]
    row_T = torch.repeat_interleave(torch.arange(lengths_S.numel(), device=cu_seqlens.device), lengths_S, output_size=length)
    column_T = torch.arange(length, device=cu_seqlens.device) - cu_seqlens[:-1].long()[row_T]
    return row_T, column_T, lengths_S.numel(), int(lengths_S.max())
