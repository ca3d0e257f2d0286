"""Run on 2 forked ranks: hidden states and gradients of the policy over zig-zag shards, and on each rank alone, of one ragged pack.

usage: context_parallel.py MODEL OUT.json
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

from megatron_rl.actor.parallel import Mesh, create_mesh, destroy_mesh, prepare_process

prepare_process(threads=1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_rl.actor.feed import alignment, shard  # noqa: E402
from megatron_rl.actor.model import PolicyModel, build_chunks, detect_implementation  # noqa: E402
from megatron_rl.config import Config, ModelConfig, ParallelConfig  # noqa: E402
from megatron_rl.convert.bridge import load_hf  # noqa: E402
from megatron_rl.convert.families import family_for  # noqa: E402
from megatron_rl.convert.hf import read_config  # noqa: E402
from megatron_rl.data.packing import pack  # noqa: E402
from megatron_rl.routing.layout import Place, gathered_order  # noqa: E402
from megatron_rl.routing.replay import RoutingReplay  # noqa: E402
from megatron_rl.types import PackedBatch  # noqa: E402
from tools.layouts.batch import make_batch  # noqa: E402


def model_and_place(folder: Path, mesh: Mesh, parallel: ParallelConfig) -> tuple[PolicyModel, RoutingReplay, Place]:
    hf = read_config(folder)
    config = Config(model=ModelConfig(path=str(folder), dtype="float32"), parallel=parallel)
    _, (model,) = build_chunks(config, family_for(hf), hf, mesh, detect_implementation())
    load_hf([model], folder)
    place = Place(0, 1, mesh.context_rank, mesh.context_size, tuple(range(model.config.num_layers)))
    return model, RoutingReplay([model], TopKRouter), place


def hidden_states(model: PolicyModel, replay: RoutingReplay, batch: PackedBatch) -> Tensor:
    """[T, H] of this rank's shard, with the given routes; carries the gradient."""
    longest = int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
    params = PackedSeqParams("thd", batch.cu_seqlens, batch.cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest)
    with replay.session("replay", [batch.routes_TLK], micro_batches=1):
        replay.start_micro_batch(0, 0)
        hidden = model(input_ids=batch.tokens_T[None], position_ids=batch.positions_T[None], attention_mask=None, packed_seq_params=params)
    return hidden.squeeze(1)


def run(folder: Path, parallel: ParallelConfig) -> dict[str, Any]:
    """The pack's real positions: tokens, hidden states; and the gradient of a fixed random function of them."""
    mesh = create_mesh(parallel)
    model, replay, place = model_and_place(folder, mesh, parallel)
    layers, experts, k = model.config.num_layers, model.config.num_moe_experts, model.config.moe_router_topk
    batch = make_batch(model.vocab_size, layers, experts, k)
    align = alignment(place)
    (whole,) = pack(batch, budget=256, multiple_of=align, align=align, micro_batches=1, experts=experts)
    mine = shard(whole, place)
    hidden_TH = hidden_states(model, replay, mine)
    real_T = mine.sequence_T < mine.num_sequences
    # One weight for each token of the vocabulary, position and feature: the same wherever the token lies in the pack.
    feature_H = torch.arange(hidden_TH.shape[1])
    weight_TH = torch.sin(mine.tokens_T[:, None] * 1.7 + mine.positions_T[:, None] * 0.3 + feature_H * 0.9 + mine.sequence_T[:, None])
    torch.where(real_T[:, None], hidden_TH * weight_TH, 0.0).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=mesh.context_group)

    def gathered(x_T: Tensor) -> Tensor:
        parts = [torch.empty_like(x_T) for _ in range(mesh.context_size)]
        dist.all_gather(parts, x_T.contiguous(), group=mesh.context_group)
        return torch.cat(parts)[gathered_order(whole.cu_seqlens, mesh.context_size)]

    real = gathered(real_T)
    return {
        "tokens": gathered(mine.tokens_T)[real],
        "hidden": gathered(hidden_TH.detach())[real],
        "gradients": gradients,
        "shard": mine.length,
        "whole": whole.length,
    }


def main() -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # a hang shows where
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    alone, shared = run(folder, ParallelConfig()), run(folder, ParallelConfig(context=2))
    if dist.get_rank() == 0:
        pairs = {n: (g, shared["gradients"][n]) for n, g in alone["gradients"].items()}
        result = {
            "positions": len(alone["tokens"]),
            "whole": shared["whole"],
            "shard": shared["shard"],
            "same_tokens": torch.equal(alone["tokens"], shared["tokens"]),
            "hidden": float((alone["hidden"] - shared["hidden"]).abs().max()),
            "hidden_scale": float(alone["hidden"].abs().max()),
            "gradients": {n: float((a - b).abs().max() / a.abs().max()) for n, (a, b) in pairs.items()},
        }
        out.write_text(json.dumps(result))
    destroy_mesh()


if __name__ == "__main__":
    main()
