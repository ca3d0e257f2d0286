"""Expert ids as SGLang sends them, decoded and checked.

Shapes: N tokens of a trajectory, D decoder layers, L of them MoE layers, K experts a token.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RouteShape:
    """What the routes of a model look like."""

    layers: int
    """D: SGLang reports a row for every decoder layer, dense ones (zeros) included."""
    moe_layers: tuple[int, ...]
    """Which of them route, counted from 0; L of them."""
    top_k: int
    experts: int


def route_shape(hf: dict[str, Any]) -> RouteShape | None:
    """The shape for the config.json `hf`; None for a dense model.

    The two rules that Hugging Face configurations have for which layers are MoE: Qwen's `decoder_sparse_step` with
    `mlp_only_layers`, and DeepSeek's `first_k_dense_replace` with `moe_layer_freq`.
    """
    experts = hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts") or 0
    if not experts:
        return None
    layers = int(hf["num_hidden_layers"])
    step, dense = hf.get("decoder_sparse_step", 1), set(hf.get("mlp_only_layers") or ())
    first, frequency = hf.get("first_k_dense_replace", 0), hf.get("moe_layer_freq", 1)
    moe = tuple(n for n in range(layers) if n not in dense and (n + 1) % step == 0 and n >= first and n % frequency == 0)
    return RouteShape(layers, moe, int(hf["num_experts_per_tok"]), int(experts))


def read_route_shape(path: str) -> RouteShape | None:
    """`route_shape` of the checkpoint folder `path`."""
    return route_shape(json.loads((Path(path) / "config.json").read_text()))


def decode_routes(encoded: str, rows: int, shape: RouteShape) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """[rows, L, K] expert ids, in the smallest type that holds them all, from SGLang's base64 of little-endian int32 [rows, D, K].

    Raises:
        ValueError: the bytes are not base64 or not of that many rows, an id is not that of an expert, or one token has the same
            expert twice in a layer.
    """
    raw = base64.b64decode(encoded, validate=True)
    width = shape.layers * shape.top_k * 4
    if len(raw) != rows * width:
        raise ValueError(
            f"{len(raw)} bytes are {len(raw) / width:g} rows of {shape.layers} layers x {shape.top_k} experts; expected {rows} rows"
        )
    ids = np.frombuffer(raw, "<i4").reshape(rows, shape.layers, shape.top_k)[:, list(shape.moe_layers)]
    if ids.size and (ids.min() < 0 or ids.max() >= shape.experts):
        row, layer, _ = np.argwhere((ids < 0) | (ids >= shape.experts))[0]
        raise ValueError(
            f"token {row}, layer {shape.moe_layers[layer]}: {ids[row, layer].tolist()} is not within the {shape.experts} experts"
        )
    ordered = np.sort(ids, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if repeated.any():
        row, layer = np.argwhere(repeated)[0]
        raise ValueError(f"token {row}, layer {shape.moe_layers[layer]}: {ids[row, layer].tolist()} has the same expert twice")
    return ids.astype(np.uint8) if shape.experts <= 256 else ids.astype(np.uint16)
