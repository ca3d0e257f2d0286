"""Run on two forked ranks: checkpoints written under each layout, resharded to another, with and without optimizer state.

usage: reshard.py FOLDER OUT LAYOUTS TOUR       FOLDER is a Hugging Face folder, LAYOUTS and TOUR are JSON lists of "tensor=2 expert=2"

Rank 0 writes OUT/seen.json. At the end it waits for rank 1 in vain.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_rl.actor.parallel import create_mesh, prepare_process
from megatron_rl.config import ParallelConfig

prepare_process(threads=1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_rl.actor.actor import Actor  # noqa: E402
from megatron_rl.actor.checkpoint import TrainState, load, save  # noqa: E402
from megatron_rl.convert.bridge import export_hf  # noqa: E402
from megatron_rl.convert.commands import hf_to_mcore, mcore_to_hf  # noqa: E402
from megatron_rl.convert.families import family_for  # noqa: E402
from megatron_rl.convert.hf import HfReader, read_config  # noqa: E402
from megatron_rl.convert.mcore_reader import McoreReader  # noqa: E402
from megatron_rl.convert.reshard import reshard  # noqa: E402
from megatron_rl.convert.session import conversion_config  # noqa: E402


def layout(words: str) -> ParallelConfig:
    return ParallelConfig(**{k: int(v) for k, v in (pair.split("=") for pair in words.split())})


def contents(step: Path) -> dict[str, Tensor]:
    """Every tensor as a whole, read without Megatron."""
    reader, found = McoreReader(step), {}
    for key in reader.keys():  # noqa: SIM118 (no mapping)
        found[key] = torch.zeros(reader.size(key), dtype=reader.dtype(key))
        reader.read(key, (0,) * found[key].dim(), found[key])
    return found


def different(a: Path, b: Path) -> list[str]:
    """Tensors that are not in both, or not alike; the vocabulary may be padded otherwise, with zeros."""
    mine, other = contents(a), contents(b)
    bad = sorted(mine.keys() ^ other.keys())
    for key in mine.keys() & other.keys():
        rows = min(mine[key].shape[0], other[key].shape[0])
        longer = max(mine[key], other[key], key=lambda tensor: tensor.shape[0])
        if not torch.equal(mine[key][:rows], other[key][:rows]) or longer[rows:].any():
            bad.append(key)
    return bad


def weights(folder: Path, out: Path, layouts: list[str]) -> dict[str, list[str]]:
    """Every layout's checkpoint, resharded to the next; one of them exported."""
    steps = {words: hf_to_mcore(str(folder), str(out / f"from {words}"), layout(words)) for words in layouts}
    seen = {}
    for a, b in itertools.pairwise([*layouts, layouts[0]]):
        made = reshard(str(steps[a]), str(out / f"{a} to {b}"), layout(b))
        if dist.get_rank() == 0:
            seen[f"{a} > {b}"] = different(steps[a], made)
    back = mcore_to_hf(str(out / f"{layouts[1]} to {layouts[2]}"), str(out / "back"), str(folder), file_bytes=100_000)
    old, new = HfReader(folder), HfReader(back)
    seen["back"] = sorted(old.names() ^ new.names()) + [n for n in old.names() if not torch.equal(old.tensor(n), new.tensor(n))]
    seen["files"] = sorted(file.name for file in back.glob("*.safetensors"))
    return seen


def build(folder: Path, words: str) -> Actor:
    """An actor that trains, in its layout."""
    hf, parallel = read_config(folder), layout(words)
    mesh = create_mesh(parallel)
    return Actor(conversion_config(str(folder), parallel, "float32"), mesh, family_for(hf), hf)


def optimizer(folder: Path, out: Path, tour: list[str]) -> dict[str, Any]:
    """A checkpoint after one optimizer step, and where it differs from itself after each stop of a tour through layouts."""
    actor = build(folder, tour[0])
    actor.load_hf(folder)
    step(actor)
    state = TrainState(1, 1, 1, 0, actor.hf["architectures"][0], actor.mesh.world_size, has_optimizer=True)
    first = here = save(out / "trained", {"actor": actor}, state, keep=1)
    step(actor)
    second = [parameter.detach().clone() for chunk in actor.chunks for parameter in chunk.parameters()]
    seen: dict[str, Any] = {"trained": []}
    for number, words in enumerate(tour[1:]):
        here = reshard(str(here), str(out / f"stop {number}"), layout(words))
        if dist.get_rank() == 0:
            seen["trained"].append([words, different(first, here), len(contents(here))])
    alone = reshard(str(here), str(out / "alone"), layout("pipeline=2"), weights_only=True)
    if dist.get_rank() == 0:
        seen["weights only"] = sorted(contents(alone).keys())
    # The next step from the last stop is the next step from the first, so nothing of the state is only there for show.
    toured = build(folder, tour[-1])
    load(here, {"actor": toured}, toured.hf["architectures"][0])
    step(toured)
    after = [parameter.detach() for chunk in toured.chunks for parameter in chunk.parameters()]
    seen["second step"] = max(float((a - b).abs().max()) for a, b in zip(second, after, strict=True))
    return seen


def step(actor: Actor) -> None:
    """One optimizer step on gradients that follow from the weights, so that they are the same in every layout."""
    for model in actor.wrapped:
        model.zero_grad_buffer()
        for parameter in model.parameters():
            parameter.main_grad.copy_(parameter.detach() * 0.1 + 0.01)
    actor.optimizer.step()


def refusals(folder: Path, out: Path) -> dict[str, str]:
    """What a user reads who asks for a layout that does not divide the model."""
    hf = read_config(folder)
    others = {
        "experts": (ParallelConfig(expert=2), {"num_experts": 3}),
        "layers": (ParallelConfig(pipeline=2), {"num_hidden_layers": 3}),
    }
    messages = {}
    for name, (parallel, changed) in others.items():
        if dist.get_rank() == 0:
            (out / name).mkdir()
            (out / name / "config.json").write_text(json.dumps({**hf, **changed}))
        dist.barrier()
        try:
            reshard(str(out / "trained"), str(out / f"never {name}"), parallel, str(out / name))
        except ValueError as error:
            messages[name] = str(error)
    return messages


def timeout(folder: Path) -> str:
    """What rank 0 says when rank 1 does not come; both start after delays of their own. Ends the process groups' usefulness."""
    actor = build(folder, "tensor=2")
    actor.load_hf(folder)
    time.sleep(random.Random(actor.mesh.rank).random() * 0.2)
    if actor.mesh.rank == 1:
        weights = export_hf(actor.chunks, actor.hf, bucket_bytes=20_000)
        for _ in range(40):
            next(weights)
        time.sleep(4)
        return ""
    try:
        for _ in export_hf(actor.chunks, actor.hf, bucket_bytes=20_000, timeout=timedelta(seconds=1)):
            pass
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def main() -> None:
    folder, out, layouts, tour = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
    create_mesh(ParallelConfig())
    seen = {"weights": weights(folder, out, layouts), "optimizer": optimizer(folder, out, tour), "refusals": refusals(folder, out)}
    seen["timeout"] = {"message": timeout(folder)}
    if dist.get_rank() == 0:
        (out / "seen.json").write_text(json.dumps(seen))
    for child in multiprocessing.active_children():
        child.kill()  # Megatron's checkpoint writers would hold our output open
    os._exit(0)  # after a time-out gloo cannot leave its groups


if __name__ == "__main__":
    main()
