"""Sparse upcycling: a dense Llama or Qwen2 as a mixture of experts that starts where the dense model ended, one tensor at a time.

mixtral
    Every expert is the dense feed-forward layer (2212.05055). The gates of the chosen experts sum to 1, so that identical experts
    give the dense model's logits up to rounding. `noise` and `partial_reinit` make the experts differ.
qwen2_moe
    The shared expert is the dense layer with its down-projection doubled, under a gate of zero: sigmoid(0) = 1/2 undoes the doubling
    exactly. Routed experts are random slices of the dense layer's units whose down-projection is multiplied by `noise`: with 0 they
    add nothing, and learn as their down-projection grows.

Re-initialisation follows Drop-Upcycling (2502.19261): an expert's own random share of the intermediate units gets new weights in all
three matrices, normal with the mean and standard deviation of the weights they replace.

Some layers write the massive activations of a text's first token (an attention sink) or erase them again. Noise there is multiplied
by thousands and breaks the model, so layers whose output exceeds `keep_above` keep identical experts.

Routers have no bias and nothing to start from in a dense model: rows are Gaussian. `measured` makes them orthogonal to the layer's
mean input, which would otherwise favour the same experts for every token, and scales each row to logits of standard deviation
`router_std`, so that loads start balanced and gates distinct. `norm` measures nothing and scales by the norm in front of the layer.

The output layer is always written, even where the dense model ties it to the embedding: SGLang 0.5.23's Mixtral and Qwen2-MoE ignore
tie_word_embeddings and would serve an uninitialised output layer, without an error.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import Dtype
from .activations import TEXTS, LayerActivations, measure, read_texts
from .experts import ExpertMaker, Upcycling
from .families import LLAMA, MIXTRAL, QWEN2, QWEN2_MOE, family_for
from .family import Family
from .hf import HfReader, write_companions
from .hf_shards import shards, units, write
from .layouts import ModelShape
from .padding import Padding, padded_config
from .partial import appearing, source_files
from .progress import Progress
from .source import Source

log = logging.getLogger(__name__)

DENSE = (LLAMA, QWEN2)
TARGETS = {"mixtral": MIXTRAL, "qwen2_moe": QWEN2_MOE}
_KEPT_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
)
"""Of config.json, which mean the same in both models."""


def upcycle(dense: str | Path, out: str | Path, options: Upcycling | None = None) -> tuple[int, ...]:
    """Writes the mixture of experts of a dense model, tensor by tensor; measuring (`router`, `keep_above`) runs the dense model.

    Args:
        dense: Hugging Face folder of a Llama or Qwen2.
        out: a new folder, which appears only when it is whole.

    Returns:
        The layers that keep identical experts.

    Raises:
        ValueError: another or a damaged model, something in it that the target family cannot hold, or `out` exists.
        RuntimeError: writing failed; the message says what was kept.
    """
    options = options or Upcycling()
    reader = HfReader(dense)
    family = _dense_family(reader.config, options)
    shape = family.shape(reader.config)
    target = TARGETS[options.family]
    plain = moe_config(reader.config, family, options)
    config = padded_config(plain, shape, options.kv_heads or shape.groups)
    target.transformer_config(config)
    texts = read_texts(options.prompts) if options.prompts else TEXTS
    _check_layers(options, shape)
    origin = {"command": "upcycle", "files": source_files(Path(dense)), "texts": list(texts), **dataclasses.asdict(options)}
    with appearing(Path(out), json.loads(json.dumps(origin)), is_main=True, barrier=lambda: None) as partial:
        source = Source(reader, family, shape)
        measured = measure(dense, texts) if options.router == "measured" or options.keep_above is not None else None
        kept = _kept(options, measured)
        maker = ExpertMaker(source, family, shape, target.shape(plain), options, kept, measured)
        _write(partial, Path(dense), config, target, Padding(maker, target.shape(plain), target.shape(config)), options.dtype)
    log.info("wrote %s: %d experts, top-%d; identical in layers %s", out, options.experts, options.top_k, list(kept) or "none")
    return kept


def _write(folder: Path, dense: Path, config: Mapping[str, Any], target: Family, values: Padding, dtype: Dtype | None) -> None:
    kept = getattr(torch, dtype or config.get("dtype") or config.get("torch_dtype") or "float32")
    files = shards(units(target, values.after, kept))
    total = sum(file.size for file in files)
    with Progress("upcycle", total) as progress:
        write(folder, files, values, progress)
    weight_map = {name: file.name for file in files for unit in file.units for name, _ in unit.tensors}
    write_companions(folder, dense, config, weight_map, total, {kept})


def _dense_family(config: Mapping[str, Any], options: Upcycling) -> Family:
    family = family_for(config)
    if family not in DENSE:
        names = " and ".join(f.name for f in DENSE)
        raise ValueError(f"config.json: a {family.name} model cannot be upcycled; only {names} have all that {options.family} has, no more")
    shape = family.shape(config)
    if shape.qkv_bias and options.family == "mixtral":
        raise ValueError(f"family: 'mixtral' has no attention biases, and this {family.name} model has; use --family qwen2_moe")
    if shape.head_dim * shape.heads != shape.hidden:
        raise ValueError(
            f"config.json: head_dim = {shape.head_dim} is not hidden_size / num_attention_heads; "
            f"SGLang's {TARGETS[options.family].name} takes that whatever config.json says"
        )
    if options.expert_width is not None and not 1 <= options.expert_width <= shape.ffn:
        raise ValueError(f"expert_width: {options.expert_width} must be between 1 and the dense width {shape.ffn}")
    return family


def moe_config(dense: Mapping[str, Any], family: Family, options: Upcycling) -> dict[str, Any]:
    """config.json of the mixture of experts."""
    shape, target = family.shape(dense), TARGETS[options.family]
    shared = {name: dense[name] for name in _KEPT_FIELDS if name in dense} | {
        "architectures": list(target.architectures),
        "model_type": options.family,
        "hidden_act": "silu",
        "num_key_value_heads": shape.groups,
        "num_experts_per_tok": options.top_k,
        "attention_dropout": 0.0,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    if options.family == "mixtral":
        return shared | {"num_local_experts": options.experts, "head_dim": shape.head_dim}
    return shared | {
        "num_experts": options.experts,
        "moe_intermediate_size": options.expert_width or max(1, shape.ffn // 8),
        "shared_expert_intermediate_size": shape.ffn,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": shape.qkv_bias,
        "use_sliding_window": False,
    }


def _check_layers(options: Upcycling, shape: ModelShape) -> None:
    for layer in options.keep_layers:
        if not 0 <= layer < shape.layers:
            raise ValueError(f"keep_layers: {layer} must be between 0 and {shape.layers - 1}, the model's last layer")


def _kept(options: Upcycling, measured: Sequence[LayerActivations] | None) -> tuple[int, ...]:
    loud = set(options.keep_layers)
    if options.keep_above is not None:
        assert measured is not None
        loud |= {number for number, layer in enumerate(measured) if layer.largest > options.keep_above}
    return tuple(sorted(loud))
