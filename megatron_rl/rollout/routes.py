"""Expert ids as SGLang sends them: decoded, checked, and put together from several requests.

Row n is that of input token n; its router ran in the pass that token n + 1 was sampled from. SGLang 0.5.23 keeps rows by cache slot, so
a hit in the prefix cache reports what was chosen when the slot was filled. An update of weights in place leaves them alone, while a
retraction computes all of a request's slots again, with the weights of then.

Shapes: N tokens of a trajectory, D decoder layers, L of them MoE layers, K experts a token.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNLIKELY = 32
"""Tokens that do not all choose expert 0 of a layer where each has one expert; zeros are what a server that captured nothing sends."""


@dataclass(frozen=True)
class RouteShape:
    """What the routes of a model look like."""

    layers: int
    """D: SGLang reports a row for every decoder layer, dense ones (zeros) included."""
    moe_layers: tuple[int, ...]
    """Which of them route, counted from 0; L of them."""
    top_k: int
    experts: int


@dataclass(frozen=True)
class RouteRows:
    """Routes of consecutive input tokens, as one request reported them."""

    start: int
    """Index of the first token: the request's routed_experts_start_len."""
    routes: NDArray[np.uint8] | NDArray[np.uint16]
    """[rows, L, K]."""
    valid: NDArray[np.bool_]
    """[rows] whether the weights that chose these experts are those that sampled the next token."""


def stitch(parts: Sequence[RouteRows]) -> RouteRows:
    """One run of rows out of those of successive requests, each of which went on where the one before ended.

    Raises:
        ValueError: a gap or an overlap, or parts of different layers, experts a token or types.
    """
    first = parts[0]
    end = first.start
    for index, part in enumerate(parts):
        if part.start != end:
            kind = "a gap" if part.start > end else "an overlap"
            raise ValueError(f"request {index}: its routes begin at token {part.start}, those before it end at {end}: {kind}")
        if part.routes.shape[1:] != first.routes.shape[1:] or part.routes.dtype != first.routes.dtype:
            raise ValueError(
                f"request {index}: routes of (layers, experts a token) {part.routes.shape[1:]} {part.routes.dtype}, "
                f"those before it of {first.routes.shape[1:]} {first.routes.dtype}"
            )
        assert len(part.valid) == len(part.routes)
        end += len(part.routes)
    return RouteRows(first.start, np.concatenate([p.routes for p in parts]), np.concatenate([p.valid for p in parts]))


def valid_rows(versions: NDArray[np.int32], start: int, retractions: int) -> NDArray[np.bool_]:
    """[N - 1 - start] whether each row of one request was chosen by the weights that sampled the next token.

    Without a retraction all were, whatever updates came in between. After one, every row up to it was chosen by the weights it went on
    with, and the reply does not say where it was: only rows whose next token is of the request's last version are sure. Rows of given
    tokens (the prompt, tool output) belong to the pass that sampled the first token behind them.

    Args:
        versions: [N] weight version of each token of prompt and answer, -1 where it was not sampled.
        retractions: the reply's num_retractions.
    """
    following = versions[start + 1 :]
    sampled = np.flatnonzero(following >= 0)
    if not retractions or not len(sampled):
        return np.ones(len(following), dtype=bool)
    behind = np.searchsorted(sampled, np.arange(len(following))).clip(max=len(sampled) - 1)
    return np.asarray(following[sampled[behind]] == following[sampled[-1]])


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
        ValueError: the bytes are not base64 or not of that many rows, an id is not that of an expert, one token has the same expert
            twice in a layer, or a layer was not captured.
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
    if shape.top_k == 1 and rows >= UNLIKELY:
        never = np.flatnonzero((ids == 0).all((0, 2)))
        if never.size:
            layer = shape.moe_layers[never[0]]
            raise ValueError(f"layer {layer}: expert 0 for all {rows} tokens; the server did not capture this layer")
    return ids.astype(np.uint8) if shape.experts <= 256 else ids.astype(np.uint16)
