"""The multi-node example, as far as it goes without GPUs: its commands, and its configuration against the model's numbers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def dry_run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "TRAIN_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        ["bash", "examples/qwen3_30b_a3b_h100.sh", "--dry-run", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_the_h100_dry_run_prints_every_command_and_checks_the_configuration() -> None:
    done = dry_run(ROLLOUT_NODES="r0 r1 r2", MASTER_ADDR="t0")
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines() if re.search(r" -m \w", line)]
    servers = [c for c in commands if "sglang.launch_server" in c]
    trainers = [c for c in commands if "megatron_rl" in c]
    assert len(servers) == 6, "three nodes of 8 GPUs, two servers of tensor parallel 4 each"
    assert len(trainers) == 2
    for server in servers:
        assert "--enable-return-routed-experts" in server
        assert server[server.index("--chunked-prefill-size") + 1] == "8192"
        assert "--enable-hierarchical-cache" not in server
    urls = ",".join(f'"http://r{node}:{port}"' for node in range(3) for port in (30000, 30001))
    for rank, trainer in enumerate(trainers):
        assert trainer[trainer.index("--node-rank") + 1] == str(rank)
        assert trainer[trainer.index("--master-addr") + 1] == "t0"
        assert trainer[trainer.index("--rollout.urls") + 1] == f"[{urls}]"
    # 16 ranks / (TP4 x PP2) leave two data-parallel groups.
    assert "fits: Qwen3MoeForCausalLM, 48 layers, 128 experts on 16 ranks: tensor 4, pipeline 2, context 1, expert 8, data 2" in done.stdout


def test_the_h100_dry_run_refuses_a_layout_that_the_model_cannot_have() -> None:
    done = dry_run("--parallel.tensor", "8")
    assert done.returncode == 2
    assert done.stderr.strip() == "megatron-rl: error: parallel.tensor: 8 must divide the model's 4 key-value heads"
