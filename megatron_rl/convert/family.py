"""What a model family is: which config.json fields it reads, which Megatron arguments follow, and which tensors it has.

A family states which fields of config.json it reads, which may only have certain values, and which do not matter. Any other
field is refused by name, since it may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .layouts import Layout, ModelShape, Shape
from .quantised import check_quantisation
from .rope import Kind, read_rope

VOCAB_DIVISOR = 128
"""Megatron's default for make_vocab_size_divisible_by: keeps the output projection's tiles whole on GPU."""


@dataclass(frozen=True)
class HfTensor:
    """A tensor of the Hugging Face checkpoint; the shape is in symbols of `ModelShape`."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True)
class TensorMapping:
    """One row of a table: a Megatron tensor and the Hugging Face tensors it is made of."""

    mcore: tuple[str, ...]
    """Every name it may have: with local layer specs, with Transformer Engine's, with experts one by one or grouped."""
    hf: tuple[HfTensor, ...]
    layout: Layout
    part: Literal["embedding", "layer", "dense-layer", "moe-layer", "expert", "final", "head"]
    only: str | None = None
    """A symbol of `ModelShape`: models in which it is zero or false do not have the tensor."""
    dtype: torch.dtype | None = None
    """Of the tensor wherever it is kept; None where it follows the model's."""

    @property
    def key(self) -> str:
        """The first name stands for the row."""
        return self.mcore[0]


@dataclass(frozen=True)
class FusedExperts:
    """How some writers store the experts of a layer: one tensor [experts, rows, columns] in place of `parts` for each expert."""

    name: str
    parts: tuple[str, ...]
    """Names of the tensors stacked along rows, in order."""
    written: bool = False
    """Whether exports have it in place of its one part, since that is how the family's own checkpoints are."""


@dataclass(frozen=True)
class Slot:
    """One tensor of the whole Megatron model."""

    mapping: TensorMapping
    layer: int | None = None
    expert: int | None = None

    @property
    def key(self) -> tuple[str, int | None, int | None]:
        """Row, layer, expert."""
        return self.mapping.key, self.layer, self.expert

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Names in the Hugging Face checkpoint."""
        return tuple(t.name.format(layer=self.layer, expert=self.expert) for t in self.mapping.hf)

    def hf_shapes(self, shape: ModelShape) -> tuple[Shape, ...]:
        """Shapes in the Hugging Face checkpoint."""
        return tuple(shape.resolve(t.shape) for t in self.mapping.hf)

    def __str__(self) -> str:
        return self.mapping.key.format(layer=self.layer, expert=self.expert)


@dataclass(frozen=True)
class Family:
    """A table and the meaning of its config fields."""

    name: str
    architectures: tuple[str, ...]
    required: frozenset[str]
    optional: Mapping[str, Any]
    """Fields that are read, with the value transformers takes where they are absent; None where it is derived."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Fields that may be absent or have one of these values."""
    tensors: tuple[TensorMapping, ...]
    transformer: Mapping[str, Any]
    """Arguments of TransformerConfig that all models of the family share."""
    arguments: tuple[Callable[[Mapping[str, Any], ModelShape], dict[str, Any]], ...] = ()
    """Arguments of TransformerConfig that follow from the fields; later ones take precedence."""
    routed: Callable[[Mapping[str, Any], int], bool] | None = None
    """(fields, layer) -> whether the layer has experts; None for a dense model."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields."""
    ignored: frozenset[str] = frozenset()
    """Fields that transformers derives from others, whatever the file says."""
    fused_experts: tuple[FusedExperts, ...] = ()
    rope: tuple[Kind, ...] = ("default",)
    """Kinds of rotary scaling that Megatron computes for it."""
    expert_width: str = "moe_intermediate_size"
    """The field with the width of one expert."""
    extra_layers: bool = False
    """Whether a checkpoint may hold layers beyond the model's (multi-token prediction), which are left out."""
    layer_types: tuple[str, ...] = ("full_attention",)
    """Kinds of attention a layer may have."""
    head_norm: Literal["none", "head", "projection"] = "none"
    """What queries and keys are normalised over, if at all: each head, or all heads together."""

    @property
    def moe(self) -> bool:
        """Whether its models route."""
        return self.routed is not None

    def written_together(self, shape: ModelShape) -> dict[str, str]:
        """Of each tensor of one expert that its checkpoints hold for all experts of a layer in one: that one's name."""
        return {
            fused.parts[0].format(layer=layer, expert=expert): fused.name.format(layer=layer)
            for fused in self.fused_experts
            if fused.written
            for layer in range(shape.layers)
            for expert in range(shape.experts)
        }

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of config.json under their canonical names, checked.

        Raises:
            ValueError: a field is missing, unknown, or asks for something this family cannot compute.
        """
        config = {self.aliases.get(name, name): value for name, value in hf.items()}
        known = self.required | self.optional.keys() | self.fixed.keys() | self.ignored | HARMLESS
        for name in sorted(config.keys() - known):
            raise ValueError(f"config.json: {name} = {config[name]!r} is unknown for {self.name} and may change what it computes")
        for name in sorted(self.required):
            if config.get(name) is None:
                raise ValueError(f"config.json: {name} is missing; {self.name} needs it")
        for name, allowed in self.fixed.items():
            if name in config and config[name] not in allowed:
                only = f"only {_any_of(allowed)}{REMEDIES.get(name, '')}"
                raise ValueError(f"config.json: {name} = {config[name]!r} is not supported for {self.name}; {only}")
        for kind in config.get("layer_types") or ():
            if kind not in self.layer_types:
                raise ValueError(f"config.json: layer_types holds {kind!r}; only {_any_of(self.layer_types)} is supported for {self.name}")
        check_quantisation(config)
        read_rope(config, self.name, self.rope)
        return {**self.optional, **config}

    def shape(self, hf: Mapping[str, Any], *, padded_vocab: int | None = None) -> ModelShape:
        """Sizes of the model; without `padded_vocab`, the vocabulary is not padded."""
        config = self.read(hf)
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        latent = config.get("kv_lora_rank") or 0
        rotary = config["qk_rope_head_dim"] if latent else 0
        return ModelShape(
            layers=layers,
            vocab=config["vocab_size"],
            padded_vocab=padded_vocab or config["vocab_size"],
            hidden=config["hidden_size"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=config["qk_nope_head_dim"] + rotary if latent else config["head_dim"] or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            moe_ffn=config[self.expert_width] if self.moe else 0,
            experts=config["num_experts"] if self.moe else 0,
            moe_layers=tuple(self.routed is not None and self.routed(config, layer) for layer in range(layers)),
            tied=config["tie_word_embeddings"],
            qkv_bias=bool(config.get("qkv_bias")),
            shared_ffn=_shared_width(config),
            query_rank=config.get("q_lora_rank") or 0,
            key_rank=latent,
            rotary=rotary,
            value_dim=config["v_head_dim"] if latent else 0,
        )

    def transformer_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of megatron.core's TransformerConfig that the model decides; layout, dtype and training stay the caller's.

        With multi_latent_attention they are MLATransformerConfig's.
        """
        config, shape = self.read(hf), self.shape(hf)
        arguments = {
            "num_layers": shape.layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads,
            "num_query_groups": shape.groups,
            "kv_channels": shape.head_dim,
            "ffn_hidden_size": shape.ffn,
            "layernorm_epsilon": config["rms_norm_eps"],
            "add_qkv_bias": shape.qkv_bias,
            "qk_layernorm": self.head_norm == "head",
            **self.transformer,
        }
        if self.moe:
            arguments |= {
                "num_moe_experts": shape.experts,
                "moe_ffn_hidden_size": shape.moe_ffn,
                "moe_layer_freq": [int(routes) for routes in shape.moe_layers],
            }
        for derive in self.arguments:
            arguments |= derive(config, shape)
        return arguments

    def config_attributes(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """What Megatron reads from attributes of its configuration that the configuration's class does not have."""
        config = self.read(hf)
        return {} if config.get("kv_lora_rank") else read_rope(config, self.name, self.rope).config_attributes()

    def gpt_model(self, hf: Mapping[str, Any], *, tensor_parallel: int = 1, divisor: int = VOCAB_DIVISOR) -> dict[str, Any]:
        """The arguments of megatron.core's GPTModel that the model decides.

        `vocab_size` is the padded one, a multiple of divisor x tensor_parallel; `shape(hf).vocab` is the true one.
        """
        config = self.read(hf)
        rope = read_rope(config, self.name, self.rope)
        return {
            "vocab_size": padded_vocab_size(config["vocab_size"], divisor * tensor_parallel),
            "max_sequence_length": config["max_position_embeddings"],
            "share_embeddings_and_output_weights": config["tie_word_embeddings"],
            # Latent attention turns its own queries and keys.
            **({"position_embedding_type": "rope"} if config.get("kv_lora_rank") else rope.gpt_model()),
        }

    def slots(self, shape: ModelShape) -> Iterator[Slot]:
        """Every tensor of the whole model once, in order of depth: the order of every export."""
        present = [m for m in self.tensors if m.only is None or getattr(shape, m.only)]
        rows = {part: [m for m in present if m.part == part] for part in _PARTS}
        yield from (Slot(m) for m in rows["embedding"])
        for layer, routes in enumerate(shape.moe_layers):
            for part in ("layer", "moe-layer" if routes else "dense-layer"):
                yield from (Slot(m, layer) for m in rows[part])
            if routes:
                yield from (Slot(m, layer, expert) for expert in range(shape.experts) for m in rows["expert"])
        yield from (Slot(m) for m in rows["final"])
        if not shape.tied:
            yield from (Slot(m) for m in rows["head"])


_PARTS = ("embedding", "layer", "dense-layer", "moe-layer", "expert", "final", "head")


def padded_vocab_size(vocab: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that holds the vocabulary."""
    return -(-vocab // multiple) * multiple


def _any_of(values: tuple[Any, ...]) -> str:
    return " or ".join(repr(value) for value in values)


def _shared_width(config: Mapping[str, Any]) -> int:
    """Qwen2-MoE gives it; DeepSeek gives a number of experts of the common width."""
    return config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * config.get("moe_intermediate_size", 0)


REMEDIES = {
    "num_nextn_predict_layers": "; set it to 0 to leave the layers of multi-token prediction out",
    "attention_bias": " (Megatron cannot give the output projection a bias without giving the feed-forward layers one)",
}
"""What follows an error about a field."""
HARMLESS = frozenset(
    {
        "architectures",
        "model_type",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "max_window_layers",
        "_name_or_path",
        "layer_types",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "quantization_config",
    }
)
"""Fields that change no logit, or that `Family.read` judges by itself."""
