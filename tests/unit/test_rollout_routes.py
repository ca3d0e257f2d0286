"""Decoding of SGLang's expert ids: which rows survive, in which type, and what is refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from megatron_rl.rollout.routes import RouteShape, decode_routes, route_shape


def encode(ids: np.ndarray) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def distinct(rows: int, layers: int, top_k: int, experts: int, seed: int = 0) -> np.ndarray:
    scores = np.random.default_rng(seed).random((rows, layers, experts))
    return scores.argsort(-1)[..., :top_k]


def test_every_layer_routes_in_qwen3_moe() -> None:
    hf = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
    assert route_shape(hf) == RouteShape(4, (0, 1, 2, 3), 2, 8)


def test_sparse_step_and_dense_layers() -> None:
    """Layer n routes when n + 1 is a multiple of the step: 1, 3, 5; 3 is listed as dense."""
    hf = {"num_hidden_layers": 6, "num_local_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    shape = route_shape(hf)
    assert shape is not None and shape.moe_layers == (1, 5)


def test_deepseek_starts_dense() -> None:
    hf = {"num_hidden_layers": 5, "n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1}
    shape = route_shape(hf)
    assert shape is not None and shape.moe_layers == (3, 4)


def test_dense_model_has_none() -> None:
    assert route_shape({"num_hidden_layers": 4}) is None


def test_dense_layers_are_dropped() -> None:
    """SGLang sends zeros for dense layers, which would look like a repeated expert if they were kept."""
    ids = distinct(5, 3, 2, 8)
    ids[:, 0] = 0
    decoded = decode_routes(encode(ids), 5, RouteShape(3, (1, 2), 2, 8))
    np.testing.assert_array_equal(decoded, ids[:, 1:])


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_smallest_type(experts: int, dtype: type) -> None:
    """256 experts have ids up to 255, the largest uint8."""
    ids = distinct(3, 1, 4, experts)
    ids[0, 0] = [experts - 1, 0, 1, 2]
    decoded = decode_routes(encode(ids), 3, RouteShape(1, (0,), 4, experts))
    assert decoded.dtype == dtype
    assert decoded[0, 0, 0] == experts - 1


def test_no_rows() -> None:
    assert decode_routes("", 0, RouteShape(2, (0, 1), 2, 8)).shape == (0, 2, 2)


def test_wrong_row_count() -> None:
    with pytest.raises(ValueError, match="are 4 rows of 2 layers x 2 experts; expected 5 rows"):
        decode_routes(encode(distinct(4, 2, 2, 8)), 5, RouteShape(2, (0, 1), 2, 8))


@pytest.mark.parametrize("bad", [-1, 8])
def test_id_out_of_range(bad: int) -> None:
    ids = distinct(4, 2, 2, 8)
    ids[2, 1] = [3, bad]
    with pytest.raises(ValueError, match=r"token 2, layer 1: \[3, -?\d\] is not within the 8 experts"):
        decode_routes(encode(ids), 4, RouteShape(2, (0, 1), 2, 8))


def test_repeated_expert_counts_original_layers() -> None:
    """The message names layer 2 of the model, though it is the first that routes."""
    ids = distinct(4, 3, 3, 8)
    ids[1, 2] = [5, 0, 5]
    with pytest.raises(ValueError, match=r"token 1, layer 2: \[5, 0, 5\] has the same expert twice"):
        decode_routes(encode(ids), 4, RouteShape(3, (2,), 3, 8))


def test_not_base64() -> None:
    with pytest.raises(ValueError, match="base64"):
        decode_routes("###", 1, RouteShape(1, (0,), 1, 8))
