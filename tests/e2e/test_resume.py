"""A run that is killed and started again ends where an uninterrupted one does, to the last bit in fp32.

Supervised training is used because its data are given: the same actor, optimizer, packing, checkpoint and data order as RL, without
the sampler of a server, whose random state no checkpoint holds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.dist.launch import ROOT
from tools.make_chain_sum import Sizes, make_chain_sum

pytestmark = [pytest.mark.dist]
STEPS = 6


def start(model: Path, data: Path, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megatron_rl", "sft"]
    command += ["--config", str(ROOT / "examples/configs/quickstart_sft.yaml"), "--model.path", str(model)]
    command += ["--data.path", str(data / "teacher.jsonl"), "--logging.dir", str(folder), "--logging.tensorboard", "false"]
    command += ["--parallel.tensor", "2", "--parallel.expert", "2", "--train.steps", str(STEPS), "--train.batch_size", "8"]
    command += ["--checkpoint.every", "2"]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-4000:]


def losses(folder: Path) -> dict[int, tuple[float, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


def test_killed_and_resumed_equals_uninterrupted(tiny_moe: Path, tmp_path: Path) -> None:
    make_chain_sum(tmp_path / "data", Sizes(train=64, teacher=64, eval=8))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(start(tiny_moe, tmp_path / "data", whole))
    victim = start(tiny_moe, tmp_path / "data", cut)
    deadline = time.monotonic() + 200
    while not (cut / "checkpoints/step_000002/state.json").is_file():
        assert victim.poll() is None, victim.communicate()[0][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # torchrun gives each rank a session of its own, so the group's signal would miss them
    for process in (*psutil.Process(victim.pid).children(recursive=True), victim):
        process.kill()
    victim.communicate()
    assert not (cut / "hf").exists(), "it was to be killed before the end"
    finish(start(tiny_moe, tmp_path / "data", cut))
    assert losses(cut) == losses(whole)
    assert sorted(losses(whole)) == list(range(1, STEPS + 1))
    found, wanted = (load_file(f / "hf/model.safetensors") for f in (cut, whole))
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(wanted[name]) for name in wanted)
