"""Run on forked ranks: loads tiny checkpoints under each layout asked for and exports them again; rank 0 writes what it saw.

usage: convert.py FOLDER OUT.json '["moe tensor=2 expert=2", ...]'; FOLDER holds one checkpoint a subfolder, with reference.safetensors
(tokens, logits) beside the weights.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from megatron_rl.actor.parallel import Mesh, create_mesh, destroy_mesh, prepare_process
from megatron_rl.config import ParallelConfig

prepare_process(threads=1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from megatron_rl.actor.model import PolicyModel  # noqa: E402
from megatron_rl.convert.bridge import export_hf, load_hf  # noqa: E402
from megatron_rl.convert.commands import hf_to_mcore, mcore_to_hf  # noqa: E402
from megatron_rl.convert.hf import HfReader, read_config  # noqa: E402
from tools.families.through_megatron import build, logits  # noqa: E402


def export(chunks: list[PolicyModel], reader: HfReader, mesh: Mesh, **options: Any) -> dict[str, Any]:
    """Names in this rank's order; the names whose tensors differ; whether the other ranks got None; seconds."""
    dist.barrier()
    start = time.perf_counter()
    got = []
    for name, tensor in export_hf(chunks, reader.config, **options):
        if "bucket_bytes" in options:  # the slow export: ranks that drift apart must still meet in the same exchanges
            time.sleep(random.Random(f"{mesh.rank} {name}").random() * 5e-4)
        got.append((name, tensor))
    seconds = time.perf_counter() - start
    held = [tensor is not None for _, tensor in got]
    different = [n for n, t in got if t is not None and not torch.equal(t, reader.tensor(n))]
    return {"names": [n for n, _ in got], "different": different, "held": all(held) if mesh.is_main else any(held), "seconds": seconds}


def padding_is_zero(chunks: list[PolicyModel], vocab: int) -> bool:
    """Whether this rank's embedding rows beyond the vocabulary are zero."""
    weights = [w for c in chunks for n, w in c.named_parameters() if n == "embedding.word_embeddings.weight"]
    first = [ps.get_tensor_model_parallel_rank() * w.shape[0] for w in weights]
    return all(bool((w[max(0, vocab - start) :] == 0).all()) for w, start in zip(weights, first, strict=True))


def run(folder: Path, layout: str) -> dict[str, Any]:
    """One checkpoint under one layout."""
    parallel = ParallelConfig(**{k: int(v) for k, v in (pair.split("=") for pair in layout.split())})
    reader = HfReader(folder)
    mesh = create_mesh(parallel)
    chunks = build(folder, parallel, mesh)
    load_hf(chunks, folder)
    result: dict[str, Any] = {
        "export": mesh.gather(export(chunks, reader, mesh)),
        "again": mesh.gather(export(chunks, reader, mesh)),
        "slow": mesh.gather(export(chunks, reader, mesh, bucket_bytes=20_000)),
        "padding_is_zero": all(mesh.gather(padding_is_zero(chunks, reader.config["vocab_size"]))),
    }
    bfloat16 = {name: tensor for name, tensor in export_hf(chunks, reader.config, dtype=torch.bfloat16) if tensor is not None}
    result["bfloat16"] = all(torch.equal(t, reader.tensor(n).bfloat16()) for n, t in bfloat16.items())
    if parallel.pipeline == 1:
        reference = load_file(folder / "reference" / "logits.safetensors")
        tokens = reference["tokens"]
        got = logits(chunks, tokens, (tokens.numel(),), mesh)[:, : reader.config["vocab_size"]]
        result["max_logit_diff"] = float((got - reference["logits"]).abs().max())
    mesh.barrier()
    return result


def mismatches(folder: Path) -> dict[str, str]:
    """What a user reads who loads a checkpoint into a model built for another."""
    hf = read_config(folder / "moe")
    mesh = create_mesh(ParallelConfig())
    chunks = build(folder / "moe", ParallelConfig(), mesh)
    wrong = {
        "architecture": {**hf, "architectures": ["GemmaForCausalLM"]},
        "vocabulary": {**hf, "vocab_size": 4096},
        "layers": {**hf, "num_hidden_layers": 3},
        "width": {**hf, "moe_intermediate_size": 40},
        "experts": {**hf, "num_local_experts": 16},
        "kind": {**hf, "mlp_only_layers": []},
    }
    messages = {}
    for name, config in wrong.items():
        try:
            next(export_hf(chunks, config))
        except ValueError as error:
            messages[name] = str(error)
    return messages


def commands(folder: Path, out: Path) -> dict[str, list[str]]:
    """HF -> distributed checkpoint under one layout -> HF under another: the tensors that differ."""
    layouts = {1: (ParallelConfig(), ParallelConfig()), 2: (ParallelConfig(tensor=2), ParallelConfig(pipeline=2))}
    write, read = layouts[dist.get_world_size()]
    different = {}
    for name in ("moe", "dense"):
        hf_to_mcore(str(folder / name), str(out / name), write)
        back = mcore_to_hf(str(out / name), str(out / f"{name}-back"), str(folder / name), read)
        old, new = HfReader(folder / name), HfReader(back)
        different[name] = sorted(old.names() ^ new.names()) + [n for n in old.names() if not torch.equal(old.tensor(n), new.tensor(n))]
    return different


def main() -> None:
    folder, out, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    seen: dict[str, Any] = {
        "runs": {case: run(folder / case.split()[0], case.partition(" ")[2]) for case in cases},
        "commands": commands(folder, out.parent / f"{out.stem}-checkpoints"),
    }
    if dist.get_world_size() == 1:
        seen["mismatches"] = mismatches(folder)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seen))
    destroy_mesh()


if __name__ == "__main__":
    main()
