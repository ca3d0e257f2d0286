"""The main job in small, as a user starts it: torchrun, two ranks, a real server; finished, resumed, and interrupted by Ctrl-C."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_rl.record.store import Store
from megatron_rl.telemetry.metrics import read_metrics
from megatron_rl.telemetry.names import find_metric
from tests.dist.launch import ROOT
from tests.e2e.clock import without_clock
from tools.make_chain_sum import Sizes, make_chain_sum

pytestmark = [pytest.mark.engine, pytest.mark.dist]


@pytest.fixture(scope="module")
def folder(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model under a path of its own, so that this test's servers can be told from others, and data."""
    root = tmp_path_factory.mktemp("train")
    shutil.copytree(tiny_moe, root / "model")
    make_chain_sum(root / "data", Sizes(train=64, teacher=8, eval=16))
    return root


TWO_RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megatron_rl"]


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    command = [*TWO_RANKS, "train"]
    command += ["--config", str(ROOT / "examples/configs/quickstart.yaml"), "--logging.dir", str(folder / "run")]
    command += ["--model.path", str(folder / "model"), "--data.path", str(folder / "data/train.jsonl")]
    command += ["--data.eval_path", str(folder / "data/eval.jsonl"), "--rollout.launch", "1", "--train.steps", str(steps)]
    command += ["--rollout.prompts_per_step", "4", "--rollout.samples_per_prompt", "4", "--replay.probe_every", "1"]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Ranks and servers of this test: their command lines name its folder. SGLang's own children hang below its launcher."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in " ".join(process.info["cmdline"] or []):
            found |= {p.pid: p for p in [process, *process.children(recursive=True)]}
    return list(found.values())


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_a_run_ends_with_everything_it_promises(folder: Path) -> None:
    process = start(folder, steps=2)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output[-5000:]
    run = folder / "run"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    for name in ("pass_rate_before", "pass_rate_after", "seconds", "tokens_per_second", "k3_replay", "k3_live", "route_mismatch_share"):
        assert math.isfinite(summary[name]), name
    assert "transformer_engine" not in output
    assert "local layers" in output, "the choice of layers is printed"
    rows = [r for r in read_metrics(run) if "reward/mean" in r]
    assert [r["weight_version"] for r in rows] == [1, 2]
    # every token was sampled by the weights it was trained on, and replay leaves bf16 rounding alone
    assert all(r["lag/mean"] == 0 for r in rows)
    assert all(r["mismatch/k3_replay"] < 1e-3 for r in rows)
    assert sorted(name for name in {k for r in rows for k in r} if find_metric(name) is None) == [], "docs/metrics.md"
    # Every pair of routings is told of, and every row could be replayed. Without a single reward no update moves a score.
    assert all(0.8 < r[f"routing/{pair}exact"] <= 1 for r in rows for pair in ("", "replayed/", "moved/"))
    assert all(0.8 < r["routing/moved/gamma"] <= 1 and r["routing/unreplayable_share"] == 0 for r in rows)
    assert "Mismatch of trainer and engine" in (run / "report.html").read_text()
    assert (run / "checkpoints/step_000002/state.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    assert model.config.architectures == ["Qwen3MoeForCausalLM"]
    wait_for(lambda: not processes_of(folder), 20, "a finished run leaves no process")


def test_what_it_recorded_trains_to_the_same_bits_without_a_server(folder: Path) -> None:
    run, again = folder / "run", folder / "again"
    command = [*TWO_RANKS, "lab", "replay", str(run), "--out", str(again), "--logging.tensorboard", "false"]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-5000:]
    assert not (again / "servers").exists()
    assert seen(again) == seen(run)
    wanted, found = (load_file(f / "hf/model.safetensors") for f in (run, again))
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)
    store = Store(run / "record")
    assert (store.steps, [len(store.answers(step)) for step in store.steps]) == ([0, 1], [16, 16])
    for step in store.steps:
        scores = store.scores(step)
        d = [scores[a.origin].old_logp - a.trajectory.behaviour_logp for a in store.answers(step)]  # type: ignore[operator]
        largest = max(float(np.nanmax(np.abs(x))) for x in d)
        reported = next(r for r in read_metrics(run) if r["step"] == step + 1 and "reward/mean" in r)
        assert largest == pytest.approx(reported["mismatch/max_abs_trained"], rel=1e-6), "the recorded old log-probs are the trained ones"
        assert any(s.flips is not None and np.isfinite(s.flips).any() for s in scores.values()), "some were probed"


def seen(run: Path) -> list[dict[str, float | None]]:
    """Every metric of every step, as written, but how long it took."""
    rows = [row for line in (run / "metrics.jsonl").read_text().splitlines() if "reward/mean" in (row := json.loads(line))]
    return [without_clock(row) for row in rows]


def test_ctrl_c_ends_a_resumed_run_without_orphans(folder: Path) -> None:
    process = start(folder, steps=500)
    assert process.stdout is not None
    metrics = folder / "run/metrics.jsonl"
    try:
        wait_for(lambda: process.poll() is not None or '"step": 3' in metrics.read_text(), 200, "the resumed run took no step")
        assert process.poll() is None, process.stdout.read()[-5000:]
        running = processes_of(folder)
        assert len(running) >= 4, "two ranks, and a server with its children"
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        output, _ = process.communicate(timeout=60)
        assert "resumed at step 2, weight version 2" in output
        wait_for(
            lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in running), 30, f"left: {processes_of(folder)}"
        )
    finally:
        for p in processes_of(folder):
            p.kill()
