"""Attention over packed sequences where Transformer Engine is absent (CPU, or a GPU without it).

Megatron's local attention refuses packed sequences. This one takes the same `thd` layout and `PackedSeqParams` as Transformer
Engine's, unpacks the sequences into a right-padded batch, and lets torch's fused scaled-dot-product attention do the work. Padding
on the right needs no mask: a causal query never looks at a later key.

Under context parallelism each rank has the queries of its zig-zag shard (`routing.layout.context_positions`). Keys and values are
gathered over the group, and the mask compares true positions. The whole pack's keys are in memory then: Transformer Engine's ring is
for long sequences.

Legend: T positions of the pack (of the shard, for queries), S sequences, C the longest sequence, Q its part in the shard, H heads,
D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from ..routing.layout import context_positions, gathered_order


class PackedAttention(MegatronModule):
    """Core attention for Megatron's `SelfAttention`: causal within each packed sequence, grouped queries, no dropout.

    With the config's `window_size`, layers look back only so far; with `softmax_type` learnable, each head has a logit that takes
    part in the softmax and brings no value (GPT-OSS's sinks).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal) and attention_type == "self"
        assert (config.attention_dropout if attention_dropout is None else attention_dropout) == 0.0
        self.softmax_scale = softmax_scale
        self.context_group = pg_collection.cp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.look_back = config.window_size[0] if windowed and config.window_size else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

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
        """query [T, H, D], key and value [T, H_kv, D] of this rank's shard -> [T, H * D]. `packed_seq_params` are the whole pack's."""
        assert packed_seq_params is not None and attention_bias is None, "PackedAttention only takes packed (thd) sequences"
        cu_seqlens, size = packed_seq_params.cu_seqlens_q, self.context_group.size()
        queries, keys = Slots(cu_seqlens // size), Slots(cu_seqlens)
        if size > 1:
            key, value = self._gather(key, value, cu_seqlens)
        key_SHCD, value_SHCD, mask_SHQC = keys.unpack(key), keys.unpack(value), None
        if self.softmax_offset is not None:
            # A key of zeros behind all others, whose logit is then what the mask adds, and whose value is zero.
            key_SHCD, value_SHCD = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key_SHCD, value_SHCD))
            mask_SHQC = self._with_sinks(self._mask(queries, keys, cu_seqlens), self.softmax_offset, query.dtype)
        elif size > 1 or self.look_back is not None:
            mask_SHQC = self._mask(queries, keys, cu_seqlens)[:, None]
        out_SHQD = torch.nn.functional.scaled_dot_product_attention(
            queries.unpack(query),
            key_SHCD,
            value_SHCD,
            attn_mask=mask_SHQC,
            is_causal=mask_SHQC is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return queries.pack(out_SHQD).reshape(query.shape[0], -1)

    def _gather(self, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """The whole pack's keys and values, in order. Backward sums what every rank's queries say of a key on the rank that has it."""
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=self.context_group)
        both = both[gathered_order(cu_seqlens, self.context_group.size())]
        return both[..., : key.shape[-1]], both[..., key.shape[-1] :]

    @staticmethod
    def _with_sinks(mask_SQC: Tensor, sink_H: Tensor, dtype: torch.dtype) -> Tensor:
        """[S, H, Q, C + 1] to add to the logits: nothing or minus infinity, and each head's sink."""
        sequences, queries, _ = mask_SQC.shape
        added_SQC = torch.zeros(mask_SQC.shape, dtype=dtype, device=mask_SQC.device).masked_fill(~mask_SQC, float("-inf"))
        sinks = sink_H.to(dtype)[None, :, None, None].expand(sequences, -1, queries, -1)
        return torch.cat([added_SQC[:, None].expand(-1, sink_H.numel(), -1, -1), sinks], dim=-1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The sinks, divided over tensor ranks, if there are any."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets
        )

    def _mask(self, queries: Slots, keys: Slots, cu_seqlens: Tensor) -> Tensor:
        """bool [S, Q, C]: each query looks at the keys of its sequence up to its own position, and back as far as the layer does."""
        position_T = context_positions(cu_seqlens, self.context_group.rank(), self.context_group.size())
        position_T = position_T - cu_seqlens[:-1].long()[queries.row_T]
        # Padding queries look at the first key: with none to look at, softmax would make NaN.
        position_SQ = position_T.new_zeros(queries.sequences, queries.longest).index_put((queries.row_T, queries.column_T), position_T)
        position_C, position_SQ1 = torch.arange(keys.longest, device=position_T.device), position_SQ[:, :, None]
        mask_SQC = position_C <= position_SQ1
        return mask_SQC if self.look_back is None else mask_SQC & (position_C >= position_SQ1 - self.look_back)


class Slots:
    """Where each position of a pack goes in a right-padded batch [sequences, longest]: its row and its column."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        lengths_S = cu_seqlens[1:] - cu_seqlens[:-1]
        self.sequences, self.longest = lengths_S.numel(), int(lengths_S.max())
        self.row_T = torch.repeat_interleave(lengths_S)
        self.column_T = torch.arange(self.row_T.numel(), device=cu_seqlens.device) - cu_seqlens[:-1].long()[self.row_T]

    def unpack(self, x_THD: Tensor) -> Tensor:
        """[S, H, C, D], zeros in the padding."""
        padded_SCHD = x_THD.new_zeros(self.sequences, self.longest, *x_THD.shape[1:])
        return padded_SCHD.index_put((self.row_T, self.column_T), x_THD).transpose(1, 2)

    def pack(self, x_SHCD: Tensor) -> Tensor:
        """[T, H, D]."""
        return x_SHCD.transpose(1, 2)[self.row_T, self.column_T]
