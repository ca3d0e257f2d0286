"""What a model family is: which config.json fields it reads, which Megatron arguments follow, and which tensors it has.

A family states which fields of config.json it reads, which may only have certain values, and which do not matter. Any other
field is refused by name, since it may change what the model computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .layouts import Layout, ModelShape, Shape

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
    moe: bool
    required: frozenset[str]
    optional: Mapping[str, Any]
    """Fields that are read, with the value transformers takes where they are absent; None where it is derived."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Fields that may be absent or have one of these values."""
    aliases: Mapping[str, str]
    """Other names of required fields."""
    tensors: tuple[TensorMapping, ...]
    fused_experts: tuple[FusedExperts, ...] = ()
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of TransformerConfig that all models of the family share."""

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of config.json under their canonical names, checked.

        Raises:
            ValueError: a field is missing, unknown, or asks for something this family cannot compute.
        """
        config = {self.aliases.get(name, name): value for name, value in hf.items()}
        for name in sorted(config.keys() - self.required - self.optional.keys() - self.fixed.keys() - HARMLESS):
            raise ValueError(f"config.json: {name} = {config[name]!r} is unknown for {self.name} and may change what it computes")
        for name in sorted(self.required):
            if config.get(name) is None:
                raise ValueError(f"config.json: {name} is missing; {self.name} needs it")
        for name, allowed in self.fixed.items():
            if name in config and config[name] not in allowed:
                raise ValueError(f"config.json: {name} = {config[name]!r} is not supported for {self.name}; only {_any_of(allowed)}")
        for kind in config.get("layer_types") or ():
            if kind != "full_attention":
                raise ValueError(f"config.json: layer_types holds {kind!r}; only 'full_attention' is supported for {self.name}")
        return {**self.optional, **config, "rope_theta": _rope_theta(config, self.name)}

    def shape(self, hf: Mapping[str, Any], *, padded_vocab: int | None = None) -> ModelShape:
        """Sizes of the model; without `padded_vocab`, the vocabulary is not padded."""
        config = self.read(hf)
        layers = config["num_hidden_layers"]
        return ModelShape(
            layers=layers,
            vocab=config["vocab_size"],
            padded_vocab=padded_vocab or config["vocab_size"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            groups=config["num_key_value_heads"],
            head_dim=config["head_dim"] or config["hidden_size"] // config["num_attention_heads"],
            ffn=config["intermediate_size"],
            moe_ffn=config["moe_intermediate_size"] if self.moe else 0,
            experts=config["num_experts"] if self.moe else 0,
            moe_layers=tuple(self.moe and _routes(config, layer) for layer in range(layers)),
            tied=config["tie_word_embeddings"],
        )

    def transformer_config(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of megatron.core's TransformerConfig that the model decides; layout, dtype and training stay the caller's."""
        config, shape = self.read(hf), self.shape(hf)
        arguments = {
            "num_layers": shape.layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads,
            "num_query_groups": shape.groups,
            "kv_channels": shape.head_dim,
            "ffn_hidden_size": shape.ffn,
            "layernorm_epsilon": config["rms_norm_eps"],
            **self.transformer,
        }
        return arguments | self._moe_config(config, shape) if self.moe else arguments

    def _moe_config(self, config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
        top_k, normalised = config["num_experts_per_tok"], config["norm_topk_prob"]
        if normalised and top_k == 1:
            raise ValueError(
                "config.json: norm_topk_prob = True with num_experts_per_tok = 1 makes every gate 1; Megatron's router cannot express that"
            )
        return {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.moe_ffn,
            "moe_router_topk": top_k,
            "moe_router_score_function": "softmax",
            # A softmax over the chosen logits is the softmax over all of them, normalised over the chosen.
            "moe_router_pre_softmax": not normalised,
            "moe_layer_freq": [int(routes) for routes in shape.moe_layers],
        }

    def gpt_model(self, hf: Mapping[str, Any], *, tensor_parallel: int = 1, divisor: int = VOCAB_DIVISOR) -> dict[str, Any]:
        """The arguments of megatron.core's GPTModel that the model decides.

        `vocab_size` is the padded one, a multiple of divisor x tensor_parallel; `shape(hf).vocab` is the true one.
        """
        config = self.read(hf)
        return {
            "vocab_size": padded_vocab_size(config["vocab_size"], divisor * tensor_parallel),
            "max_sequence_length": config["max_position_embeddings"],
            "position_embedding_type": "rope",
            "rotary_base": config["rope_theta"],
            "share_embeddings_and_output_weights": config["tie_word_embeddings"],
        }

    def slots(self, shape: ModelShape) -> Iterator[Slot]:
        """Every tensor of the whole model once, in order of depth: the order of every export."""
        rows = {part: [m for m in self.tensors if m.part == part] for part in _PARTS}
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


def _rope_theta(config: Mapping[str, Any], family: str) -> float:
    """The rotary base. transformers 5 writes rope_parameters, transformers 4 rope_theta and rope_scaling."""
    parameters = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: rope scaling of type {kind!r} is not supported for {family}; only 'default' (none)")
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor is not supported for {family}; only 1.0")
    if parameters:
        raise ValueError(f"config.json: rope parameters {sorted(parameters)} are unknown for {family}")
    if theta is None:
        raise ValueError("config.json: rope_theta is missing, both by itself and in rope_parameters")
    return theta


def _routes(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts, by the rule of transformers' Qwen3MoeDecoderLayer."""
    return layer not in (config["mlp_only_layers"] or ()) and (layer + 1) % config["decoder_sparse_step"] == 0


HARMLESS = frozenset(
    {
        "architectures",
        "model_type",
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
        "max_window_layers",
        "_name_or_path",
        "layer_types",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
    }
)
"""Fields that change no logit, or that `Family.read` judges by itself."""
