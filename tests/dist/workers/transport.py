"""Run on forked ranks over TP2 x PP2: what reaches each rank of a batch's routes; writes one line of JSON a rank.

usage: transport.py OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from megatron_rl.actor.feed import hand_out, shard_bytes
from megatron_rl.actor.parallel import create_mesh, destroy_mesh, prepare_process
from megatron_rl.config import ParallelConfig
from megatron_rl.routing.layout import Place
from megatron_rl.types import Batch, Prompt, Trajectory

TOKENS, LAYERS, K, EXPERTS = 801, 24, 8, 128
FIRST_STAGE = 18
"""Layers; the second stage has the other 6, so that a shard padded to the largest one would show."""


def make_batch() -> Batch:
    """Two trajectories whose expert ids tell token and layer apart."""
    n = TOKENS
    tokens, layers = np.arange(n - 1)[:, None, None], np.arange(LAYERS)[None, :, None]
    routes = ((tokens + 31 * layers + np.arange(K)) % EXPERTS).astype(np.uint8)
    mask = np.arange(n) > 0
    logp = np.where(mask, -1.0, np.nan).astype(np.float32)
    versions, turns = np.where(mask, 0, -1).astype(np.int32), np.where(mask, 0, -1).astype(np.int32)
    prompt = Prompt("p", np.zeros(1, np.int32), "", "")
    one = Trajectory(prompt, "g", np.zeros(n, np.int32), mask, logp, versions, turns, routes, "stop", "")
    return Batch((one, one), (np.zeros(n, np.float32),) * 2)


def main() -> None:
    prepare_process(threads=1)
    mesh = create_mesh(ParallelConfig(tensor=2, pipeline=2))
    layers = tuple(range(FIRST_STAGE)) if mesh.pipeline_rank == 0 else tuple(range(FIRST_STAGE, LAYERS))
    places = mesh.gather(Place(mesh.tensor_rank, 2, 0, 1, layers))
    batch = make_batch()
    feed = hand_out(mesh, places, batch if mesh.is_leader else None, budget=TOKENS, experts=EXPERTS, max_tokens=TOKENS)
    half = (TOKENS - 1) // 2
    routes = batch.trajectories[0].routes
    assert routes is not None
    expected = routes[mesh.tensor_rank * half :][:half][:, list(layers)]
    found = {
        "leader": mesh.is_leader,
        "micro_batches": len(feed.micro_batches),
        "right": all(b.routes_TLK is not None and np.array_equal(b.routes_TLK.numpy(), expected) for b in feed.micro_batches),
        "host_bytes": feed.host_bytes,
        "shard_bytes": shard_bytes(feed.micro_batches),
        "route_bytes": sum(b.routes_TLK.nbytes for b in feed.micro_batches if b.routes_TLK is not None),
    }
    everyone = mesh.gather(found)
    if mesh.is_main:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
    destroy_mesh()


if __name__ == "__main__":
    main()
