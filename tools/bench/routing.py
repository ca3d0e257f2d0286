#!/usr/bin/env python
"""What routes cost: bytes and time of the codec beside peers' forms, bytes to each rank, and what replay adds to a training step.

    python tools/bench/routing.py          # a table
    python tools/bench/routing.py --json   # one JSON object

32,768 tokens x 48 layers x 8 of 128 experts. Times are CPU seconds of one thread, the least of several runs that take turns, so that a
busy machine tells the same as an idle one. The peers' forms are rebuilt from their descriptions: NeMo-RL's envelope
`nrlre1:<dtype>:SxLxK:<base64>` in int8 and int32 (standard library), SGLang's base64 of int32 and prime-rl's of uint8 (pybase64, where
it is installed).

The training step is `Actor.update` of the tiny MoE (4 layers, 8 experts) on 1,024 tokens in this process: routed live, and replaying
the routes that the model takes anyway, so that the experts' work is the same. The overhead is the median over pairs of steps.

What agreement of routes costs is a probe over `replay.probe_every` times the training of a step (old log-probs and two optimizer steps,
without rollout) in the quickstart's size: 256 answers of 36 tokens.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import importlib.util
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
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, only tools/bench is on the path

from megatron_rl.actor.feed import shard, shard_bytes
from megatron_rl.actor.parallel import create_mesh, destroy_mesh, packed_object, prepare_process
from megatron_rl.config import ParallelConfig
from megatron_rl.routing.codec import FORMS, decode, encode, limit_bytes, read_header
from megatron_rl.routing.layout import Place
from megatron_rl.types import Batch, Prompt, Trajectory

TOKENS, LAYERS, K, EXPERTS = 32_768, 48, 8, 128
ANSWERS, ANSWER_TOKENS = 256, 36
"""Of a step of the quickstart."""
DISTINCT = 2_048
"""Tokens drawn; they are repeated to TOKENS."""


def random_routes(tokens: int, layers: int, k: int, experts: int) -> NDArray[np.uint8]:
    """[tokens, layers, k] distinct experts in no order."""
    unique = np.random.default_rng(0).random((min(tokens, DISTINCT), layers, experts)).argsort(-1)[..., :k].astype(np.uint8)
    return np.tile(unique, (-(-tokens // len(unique)), 1, 1))[:tokens]


def fast_base64() -> Any:
    """pybase64, as SGLang and prime-rl use it; else the standard library."""
    if importlib.util.find_spec("pybase64") is None:
        return base64
    import pybase64

    return pybase64


Form = tuple[Callable[[], Any], Callable[[Any], NDArray[Any]]]
"""(encode, decode)."""


def plain(routes: NDArray[np.uint8], dtype: str, library: Any) -> Form:
    """Base64 of the ids alone; the receiver knows their shape."""
    return (
        lambda: library.b64encode(routes.astype(dtype).tobytes()).decode(),
        lambda text: np.frombuffer(library.b64decode(text), dtype).reshape(routes.shape),
    )


def envelope(routes: NDArray[np.uint8], dtype: str) -> Form:
    """NeMo-RL's: a header that says type and shape, then base64."""

    def pack() -> str:
        return f"nrlre1:{dtype}:{'x'.join(map(str, routes.shape))}:{base64.b64encode(routes.astype(dtype).tobytes()).decode()}"

    def unpack(text: str) -> NDArray[Any]:
        _, name, shape, data = text.split(":", 3)
        return np.frombuffer(base64.b64decode(data), name).reshape([int(n) for n in shape.split("x")])

    return pack, unpack


def contenders(routes: NDArray[np.uint8]) -> dict[str, Form]:
    """Ours and the peers'."""
    ours: dict[str, Form] = {f"ours, {form}": (lambda form=form: encode(routes, EXPERTS, form), decode) for form in FORMS}
    return ours | {
        "NeMo-RL int8": envelope(routes, "int8"),
        "NeMo-RL int32": envelope(routes, "int32"),
        "SGLang int32": plain(routes, "int32", fast_base64()),
        "prime-rl uint8": plain(routes, "uint8", fast_base64()),
    }


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Of this thread."""
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def measure_codec(repeats: int) -> dict[str, dict[str, float]]:
    """Bytes, and the least CPU seconds to encode and decode, of each contender."""
    routes = random_routes(TOKENS, LAYERS, K, EXPERTS)
    forms = contenders(routes)
    encoded = {name: pack() for name, (pack, _) in forms.items()}
    for name, (_, unpack) in forms.items():
        expected = np.sort(routes, -1) if name == "ours, set" else routes
        assert np.array_equal(unpack(encoded[name]), expected), name
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in forms}
    for _ in range(repeats):
        for name, (pack, unpack) in forms.items():
            times[name][0].append(cpu_seconds(pack))
            times[name][1].append(cpu_seconds(lambda unpack=unpack, name=name: unpack(encoded[name])))
    limit = limit_bytes(read_header(encoded["ours, set"]))
    return {
        name: {"bytes": len(encoded[name]), "over_limit": len(encoded[name]) / limit, "encode_s": min(e), "decode_s": min(d)}
        for name, (e, d) in times.items()
    }


def make_batch(lengths: list[int], routes: NDArray[np.uint8], vocab: int) -> Batch:
    """One trajectory a length, all but the first token sampled."""
    rng = np.random.default_rng(1)
    answers = []
    for n in lengths:
        mask = np.arange(n) > 0
        zeros = np.where(mask, 0, -1).astype(np.int32)
        logp = np.where(mask, -6.0, np.nan).astype(np.float32)
        tokens = rng.integers(0, vocab, n).astype(np.int32)
        answers.append(Trajectory(Prompt("p", tokens[:1], "", ""), "g", tokens, mask, logp, zeros, zeros, routes[: n - 1], "stop", ""))
    return Batch(tuple(answers), tuple(np.where(t.loss_mask, 1.0, 0.0).astype(np.float32) for t in answers))


def bytes_rank_over_shard() -> float:
    """The most that is sent to a rank for the bytes of its shard, of 4,096 positions over TP2 x PP2."""
    from megatron_rl.data.packing import pack

    batch = make_batch([1025] * 4, random_routes(1024, LAYERS, K, EXPERTS), vocab=512)
    (packed,) = pack(batch, budget=4096, experts=EXPERTS)
    half = LAYERS // 2
    places = [Place(t, 2, 0, 1, tuple(range(s * half, (s + 1) * half))) for s in range(2) for t in range(2)]
    shards = [[shard(packed, place)] for place in places]
    return max(len(packed_object(one)) / shard_bytes(one) for one in shards)


def step_seconds(repeats: int) -> dict[str, list[float]]:
    """CPU seconds of training steps, live and replayed, in pairs that began one after the other."""
    from megatron_rl.actor import feed
    from megatron_rl.actor.actor import Actor
    from megatron_rl.config import Config, ModelConfig, ObjectiveConfig
    from megatron_rl.convert.families import family_for
    from megatron_rl.methods.registry import build
    from tools.make_tiny_moe import TinyModel, make_tiny_moe

    tiny = TinyModel()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_moe(Path(folder) / "model", tiny)
        config = Config(model=ModelConfig(path=str(model), dtype="float32"))
        hf = json.loads((model / "config.json").read_text())
        mesh = create_mesh(ParallelConfig())
        actor = Actor(config, mesh, family_for(hf), hf)
        actor.load_hf(model)
    batch = make_batch([129] * 8, random_routes(128, tiny.layers, tiny.topk, tiny.experts), tiny.vocab)
    given = feed.hand_out(mesh, actor.places, batch, budget=512, experts=tiny.experts, max_tokens=128)
    own = actor.score(given.micro_batches, "record").routes
    batches = [dataclasses.replace(b, routes_TLK=rows.to(torch.uint8)) for b, rows in zip(given.micro_batches, own, strict=True)]
    stack = build(ObjectiveConfig(), ())
    times: dict[str, list[float]] = {"live": [], "replay": []}
    for number in range(repeats + 1):  # the first warms up
        for routing, found in list(times.items())[:: 1 if number % 2 else -1]:
            step = lambda routing=routing: actor.update(batches, stack, given.over, lr=0.0, routing=routing)  # noqa: E731
            found.append(cpu_seconds(step))
    destroy_mesh()
    return {routing: found[1:] for routing, found in times.items()}


def agreement_cost(repeats: int) -> float:
    """Share of a step's training that probing takes at the default `replay.probe_every`."""
    from megatron_rl.config import ReplayConfig
    from megatron_rl.experience import hand_out_batch
    from megatron_rl.probe import probe, probe_again
    from megatron_rl.stages import optimize, score_old
    from tools.layouts.matrix import Case
    from tools.layouts.worker import open_case
    from tools.make_tiny_moe import TinyModel, make_tiny_moe

    tiny = TinyModel()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_tiny_moe(folder / "model", tiny)
        mesh = create_mesh(ParallelConfig())
        run = open_case(folder, Case("grpo", budget=4096), mesh)
        run.config = dataclasses.replace(run.config, replay=ReplayConfig("R3"))
    whole = make_batch([ANSWER_TOKENS] * ANSWERS, random_routes(ANSWER_TOKENS, tiny.layers, tiny.topk, tiny.experts), tiny.vocab)
    feeds = [hand_out_batch(run, whole.select(range(first, ANSWERS, 2))) for first in range(2)]
    trained, probed = [], []
    for _ in range(repeats + 1):  # the first warms up
        probed.append(cpu_seconds(lambda: probe_again(run, probe(run, feeds[0], 0)[1])))
        trained.append(cpu_seconds(lambda: optimize(run, score_old(run, feeds))))
    destroy_mesh()
    shares = [a / b for a, b in zip(probed[1:], trained[1:], strict=True)]
    return statistics.median(shares) / run.config.replay.probe_every


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30, help="training steps of each kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prepare_process(threads=1)
    codec, steps = measure_codec(options.repeats), step_seconds(options.steps)
    peers = [row["decode_s"] for name, row in codec.items() if not name.startswith("ours")]
    as_int32 = TOKENS * LAYERS * K * 4 / 1e6
    summary = {
        "bytes_over_limit": codec["ours, set"]["over_limit"],
        "decode_raw_over_best_peer": min(peers) / codec["ours, raw"]["decode_s"],
        "decode_combinatorial_mb_s": as_int32 / codec["ours, set"]["decode_s"],
        "replay_overhead": statistics.median(a / b for a, b in zip(steps["replay"], steps["live"], strict=True)) - 1,
        "bytes_rank_over_shard": bytes_rank_over_shard(),
        "agreement_cost": agreement_cost(max(3, options.steps // 6)),
    }
    if options.json:
        print(json.dumps(summary | {"load": os.getloadavg()[0], "step_s": {k: min(v) for k, v in steps.items()}, "forms": codec}))
        return
    print(f"{TOKENS} x {LAYERS} x {K} of {EXPERTS}; CPU time, one thread; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(f"{'form':<16} {'MB':>7} {'x limit':>8} {'encode ms':>10} {'decode ms':>10} {'int32 MB/s decoded':>19}")
    for name, row in codec.items():
        cells = f"{row['bytes'] / 1e6:>7.2f} {row['over_limit']:>8.3f} {1e3 * row['encode_s']:>10.1f} {1e3 * row['decode_s']:>10.1f}"
        print(f"{name:<16} {cells} {as_int32 / row['decode_s']:>19.0f}")
    print(f"a training step: {1e3 * min(steps['live']):.1f} ms live, {1e3 * min(steps['replay']):.1f} ms replayed")
    for name, value in summary.items():
        print(f"{name}: {value:.4g}")


if __name__ == "__main__":
    main()
