#!/usr/bin/env python
"""What recording costs: of a training step in the quickstart's size, and in bytes of routes over the limit log2 C(E, K) a token-layer.

    python tools/bench/recording.py          # a table
    python tools/bench/recording.py --json   # one JSON object
    python tools/bench/recording.py --run RUN   # also over the steps of a real run that recorded, servers included

A step is what the trainer alone does with 256 answers of 10 + 16 tokens (two mini-batches: one forward for old log-probs, two updates) in
one process; sampling, which takes longer, comes on top in a real one. Recording is all of it, the thread that writes included: handing
over, encoding, writing, and bringing old log-probs back to the leader. Times are CPU seconds of the process, the medians of several steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, only tools/bench is on the path

from megatron_rl.actor import feed
from megatron_rl.actor.actor import Actor, with_old
from megatron_rl.actor.collect import to_leader
from megatron_rl.actor.parallel import create_mesh, destroy_mesh, prepare_process
from megatron_rl.config import Config, ModelConfig, ObjectiveConfig, ParallelConfig
from megatron_rl.convert.families import family_for
from megatron_rl.methods.registry import build
from megatron_rl.record.files import leader_folder
from megatron_rl.record.recorder import Recorder
from megatron_rl.record.segment import ROUTE_INDEX_BYTES
from megatron_rl.record.store import FOLDER, About, Store
from megatron_rl.routing.codec import limit_bytes
from megatron_rl.routing.payloads import RouteKind
from megatron_rl.telemetry.metrics import read_metrics
from megatron_rl.types import Batch, Origin, Prompt, Trajectory

ANSWERS, PROMPT, SAMPLED, MINI_BATCHES = 256, 10, 16, 2


def make_batch(model: Any, step: int) -> Batch:
    """Answers of 8 to 24 sampled tokens, routed at random."""
    rng, answers = np.random.default_rng(step), []
    for place in range(ANSWERS):
        n = PROMPT + int(rng.integers(SAMPLED // 2, 3 * SAMPLED // 2 + 1))
        mask = np.arange(n) >= PROMPT
        where = np.where(mask, 0, -1).astype(np.int32)
        logp = np.where(mask, -6.0, np.nan).astype(np.float32)
        tokens = rng.integers(0, model.vocab, n).astype(np.int32)
        chosen = rng.random((n - 1, model.layers, model.experts)).argsort(-1)[..., : model.topk]
        prompt = Prompt(f"train:{place}", tokens[:PROMPT], "12-5+3=", "10")
        routes = np.sort(chosen, -1).astype(np.uint8)
        answers.append(
            Trajectory(
                prompt,
                f"g{place // 8}",
                tokens,
                mask,
                logp,
                where,
                where,
                routes,
                "stop",
                "12-5=7;7+3=10#10",
                1.0,
                origin=Origin(step, 0, 0, place),
            )
        )
    return Batch(tuple(answers), tuple(np.where(t.loss_mask, 1.0, 0.0).astype(np.float32) for t in answers))


def cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Of all threads of the process, and what was returned."""
    begin = time.process_time()
    result = call()
    return time.process_time() - begin, result


def measure(steps: int, folder: Path) -> dict[str, Any]:
    """CPU seconds of steps and of recording them, and bytes of what was recorded."""
    from tools.make_tiny_moe import TinyModel, make_tiny_moe

    tiny = TinyModel()
    model = make_tiny_moe(folder / "model", tiny)
    hf = json.loads((model / "config.json").read_text())
    mesh = create_mesh(ParallelConfig())
    actor = Actor(Config(model=ModelConfig(path=str(model), dtype="float32")), mesh, family_for(hf), hf)
    actor.load_hf(model)
    stack = build(ObjectiveConfig(), ())
    About({}, 1, 1, {}).save(folder / "record")
    recorder = Recorder(folder / "record", 0, limit=2**32, kind=RouteKind.smallest(tiny.experts, tiny.layers, tiny.topk))
    training, recording, waiting = [], [], []
    for step in range(steps + 1):  # the first warms up
        batch = make_batch(tiny, step)
        size = ANSWERS // MINI_BATCHES
        parts = [batch.select(range(i * size, (i + 1) * size)) for i in range(MINI_BATCHES)]
        feeds = [feed.hand_out(mesh, actor.places, part, budget=4096, experts=tiny.experts, max_tokens=32) for part in parts]

        def train(feeds: list[feed.Feed] = feeds) -> list[Any]:
            second = dataclasses.replace(
                feeds[1], micro_batches=with_old(feeds[1].micro_batches, actor.score(feeds[1].micro_batches, "replay"))
            )
            return [actor.update(f.micro_batches, stack, f.over, 0.0, routing="replay", keep_old=True) for f in (feeds[0], second)]

        def record(updates: list[Any], step: int = step, batch: Batch = batch, feeds: list[feed.Feed] = feeds) -> float:
            recorder.sampled(batch.trajectories, "train")
            recorder.batch(step, batch)
            for f, update in zip(feeds, updates, strict=True):
                assert f.batch is not None
                recorder.scored(step, f.batch, old=to_leader(mesh, f.micro_batches, update.old_logp, f.batch))
            handed_over = time.thread_time()
            recorder.wait()
            return handed_over

        seconds, updates = cpu_seconds(train)
        training.append(seconds)
        begin = time.thread_time()
        seconds, handed_over = cpu_seconds(lambda updates=updates: record(updates))
        recording.append(seconds)
        waiting.append(handed_over - begin)
    recorder.close()
    destroy_mesh()
    return {
        "step_s": statistics.median(training[1:]),
        "recording_s": statistics.median(recording[1:]),
        "caller_s": statistics.median(waiting[1:]),
    } | sizes(folder / "record")


def sizes(root: Path) -> dict[str, float]:
    """Bytes of a record, and of its routes over the limit: the blobs alone, and with what routes add to the index."""
    store = Store(root)
    kind, limit, answers = store.kind, 0.0, 0
    assert kind is not None, "a record without routes has nothing to measure"
    for step in store.steps:
        for answer in store.answers(step):
            if answer.trajectory.routes is not None:
                limit += limit_bytes(kind.header(len(answer.trajectory.routes)))
                answers += 1
    blobs = sum(f.stat().st_size for leader in range(store.about.leaders) for f in leader_folder(root, leader).glob("*.routes"))
    return {
        "bytes_an_answer": store.bytes / len(store),
        "routes_over_limit": blobs / limit,
        "routes_and_index_over_limit": (blobs + ROUTE_INDEX_BYTES * answers) / limit,
    }


def real_run(run: Path, recording_s: float) -> dict[str, float]:
    """The same recording over the wall clock of a run's own steps, and the sizes of its record."""
    seconds = statistics.median(row["seconds/step"] for row in read_metrics(run) if "seconds/step" in row)
    return {"run_step_s": seconds, "run_overhead": recording_s / seconds} | {f"run_{k}": v for k, v in sizes(run / FOLDER).items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--run", type=Path, help="logging.dir of a run that recorded, in the quickstart's size")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prepare_process(threads=1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.steps, Path(folder))
    found["overhead"] = found["recording_s"] / found["step_s"]
    if options.run is not None:
        found |= real_run(options.run, found["recording_s"])
    found["load"] = os.getloadavg()[0]
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
