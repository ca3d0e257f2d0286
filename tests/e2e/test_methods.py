"""Short real runs in which each method that acts around the loss must show that it acted: one rank, the shared fp32 server.

The model is untrained, so an answer is three tokens drawn almost evenly from 512, half of which stand for no text. The verifier wants
the empty answer: one answer of eight earns 1, two groups of four in five are all alike, and every figure below follows from that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from megatron_rl.config import ModelConfig, SyncConfig
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.sync.disk import DiskSync
from megatron_rl.telemetry.metrics import read_metrics
from megatron_rl.telemetry.names import find_metric
from tests.dist.launch import ROOT
from tests.e2e.clock import without_clock

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]  # the server's start included
PROMPTS, SAMPLES = 8, 4
TOKENS_BEYOND_ASCII = "\N{REPLACEMENT CHARACTER}"
"""What half a byte sequence decodes to: a quarter of all tokens, so that answers of six tokens have steps."""


class Runs:
    """Starts runs on the shared server, each in a folder of its own."""

    def __init__(self, engine: Fleet, model: Path, root: Path) -> None:
        self.engine, self.model, self.root = engine, model, root
        (root / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": ""}) + "\n" for i in range(64)))

    def __call__(self, name: str, steps: int, /, **sections: Any) -> list[dict[str, float]]:
        """Trains to `steps` in total with these sections over the common ones; the metrics of each step, those of earlier calls too."""
        common: dict[str, dict[str, Any]] = {
            "model": {"path": str(self.model), "dtype": "float32"},
            "optimizer": {"lr": 1e-3},
            "rollout": {
                "urls": list(self.engine.urls),
                "dtype": "float32",
                "max_new_tokens": 3,
                "samples_per_prompt": SAMPLES,
                "prompts_per_step": PROMPTS,
            },
            "data": {"source": "jsonl", "path": str(self.root / "train.jsonl"), "max_prompt_tokens": 16},
            "reward": {"marker": ""},
            "sync": {"verify": "always"},
            "train": {"steps": steps, "tokens_per_micro_batch": 512},
            "logging": {"dir": str(self.folder(name)), "tensorboard": False, "progress": "none"},
            "checkpoint": {"export": False},
            "replay": {"probe_every": 0},
        }
        for section, values in sections.items():
            if isinstance(values, dict) and section in common:
                common[section] |= values
            else:
                common[section] = values
        file = self.root / f"{name}.yaml"
        file.write_text(yaml.safe_dump(common))
        return self._run(name, "train", "--config", str(file))

    def check_replay(self, name: str, rows: list[dict[str, float]], step: int = 0) -> None:
        """Training on the record of that run from `step` on, without the server, says what `rows` do, to the last bit."""
        again, arguments = f"{name}_again", ("--from_step", str(step))
        found = self._run(again, "lab", "replay", str(self.folder(name)), "--out", str(self.folder(again)), *arguments)
        assert seen(found) == seen(rows)

    def _run(self, name: str, *arguments: str) -> list[dict[str, float]]:
        command = [sys.executable, "-m", "megatron_rl", *arguments]
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-5000:]
        rows = read_metrics(self.folder(name))
        assert sorted(metric for metric in {k for row in rows for k in row} if find_metric(metric) is None) == [], "docs/metrics.md"
        return [row for row in rows if "reward/mean" in row]

    def folder(self, name: str) -> Path:
        """Of the run of that name."""
        return self.root / name

    def state(self, name: str, step: int) -> dict[str, Any]:
        """state.json of that run's checkpoint."""
        return json.loads((self.folder(name) / f"checkpoints/step_{step:06d}/state.json").read_text())


def seen(rows: list[dict[str, float]]) -> list[dict[str, str]]:
    """Every metric of every step but how long it took; as text, in which a NaN equals itself."""
    return [{k: repr(v) for k, v in without_clock(row).items()} for row in rows]


@pytest.fixture(scope="module")
def runs(engine: Fleet, tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Gives the shared server its first weights back as version 0."""
    root = tmp_path_factory.mktemp("methods")
    yield Runs(engine, tiny_moe, root)
    with Fleet.connect(engine.urls, engine.config, ModelConfig(path=str(tiny_moe)), routes=True) as own:
        sync = DiskSync(own, SyncConfig(verify="always"), model_path=tiny_moe, folder=root / "restore", dtype=torch.float32, experts=8)
        sync.push(iter(load_file(tiny_moe / "model.safetensors").items()), 0)


def test_critic_buffer_schedules_and_reference_and_what_of_them_is_resumed(runs: Runs) -> None:
    sections: dict[str, Any] = {
        "objective": {"name": "ppo"},
        "corrections": [{"name": "tis"}, {"name": "kl_penalty"}],
        "methods": [{"name": "popo"}, {"name": "length_lr"}, {"name": "vcpo"}],
        "advantage": {"name": "gae"},
        "reference": {"path": str(runs.model)},
        "critic": {"optimizer": {"lr": 1e-3}},
    }
    first, second = runs("critic", 2, **sections)
    before = runs.state("critic", 2)
    third = runs("critic", 3, **sections)[-1]
    after = runs.state("critic", 3)

    # The head starts at 0, so every value is 0 and half the mean squared return is the loss, whatever the trunk says.
    assert first["popo/replaced_share"] == 0, "nothing can be replaced before anything was stored"
    assert first["critic/loss"] == pytest.approx(first["reward/mean"] / 2, abs=0.02), "now and then an answer ends early and weighs less"
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert abs(second["critic/explained_variance"]) > 1e-6
    assert first["critic/grad_norm"] > 0

    # theta is the reference until the first step is taken, to the last bit.
    assert first["kl_penalty/kl"] == 0
    assert second["kl_penalty/kl"] > 0

    # Every fresh informative group is stored, none has expired, and the resumed run went on with what was stored.
    stored = 0.0
    for row in (first, second, third):
        assert row.get("popo/expired_share", 0) == 0, "there is no share of an empty buffer"
        stored += PROMPTS * (1 - row["popo/uninformative_share"])
        assert row["popo/buffer_groups"] == pytest.approx(stored)
    assert second["popo/replaced_share"] > 0
    assert second["popo/staleness_mean"] == 1

    assert [before["schedules"]["length_lr"]["step"], after["schedules"]["length_lr"]["step"]] == [2, 3]
    # fp32 on both sides: all weights old/mu are 1 up to rounding in the step whose share is the reference
    assert before["schedules"]["vcpo"]["reference_share"] == pytest.approx(1.0, abs=1e-4)
    assert after["schedules"]["vcpo"] == before["schedules"]["vcpo"]
    assert 0 < third["vcpo/factor"] <= 1
    assert third["lr"] == pytest.approx(1e-3 * third["vcpo/factor"] * third["length_lr/factor"])

    # From the checkpoint of step 2, with its critic, buffer and schedules, and what was recorded of step 2.
    runs.check_replay("critic", [third], step=2)


def test_router_shift_dynamic_sampling_and_pruning_by_the_trainer_alone(runs: Runs) -> None:
    rows = runs(
        "rspo",
        2,
        objective={"name": "rspo"},
        methods=[{"name": "dynamic_sampling"}, {"name": "dvp", "params": {"support": "unpruned", "rho": 0.5}}],
        train={"mini_batches": 2},
    )
    # A group of four is informative with probability 0.41 or so: eight of eight, one round, is one step in a thousand.
    rounds = [row["dynamic_sampling/rounds"] for row in rows]
    assert all(1 < taken <= 3 for taken in rounds)
    state = runs.state("rspo", 2)
    assert (state["step"], state["prompt_batches"], state["optimizer_step"]) == (2, sum(rounds), 4)
    for row in rows:
        assert 0.5 <= row["rspo/trust_mean"] < 1, "the second mini-batch meets routers that the first moved"
        assert 0 < row["dvp/outside_share"] < 1
        # what is outside of the trainer's support was sampled as often as its pruned mass says: 24 answers a step, 3 tokens each
        assert row["dvp/outside_share"] == pytest.approx(1 - row["dvp/kept_mass_mean"], abs=0.25)
        assert row["dvp/kept_share"] == pytest.approx(1 - row["dvp/outside_share"])


def test_truncated_sampling_is_replayed_and_stale_tokens_are_accepted(runs: Runs) -> None:
    rows = runs(
        "sis",
        2,
        objective={"name": "sis"},
        corrections=[{"name": "tis"}],
        methods=[{"name": "keep_sets"}],
        rollout={"top_p": 0.9, "top_k": 64, "keep_sets": 64},
        train={"mini_batches": 2},
    )
    for row in rows:
        assert 0 < row["sampling/kept_mass"] < 0.9, "64 of 512 nearly even tokens"
        # two engines say the same of the same sets: theta's mass, over two mini-batches of which the second is one step on
        assert row["keep_sets/kept_mass_mean"] == pytest.approx(row["sampling/kept_mass"], rel=0.2)
        assert row["keep_sets/outside_share"] == 0
        assert 0 < row["sis/accepted_share"] < 1
        assert row["tis/weight_mean"] == pytest.approx(1.0, abs=1e-3), "without the log Z every weight would be 1 / mass > 1.1"


def test_steps_are_judged_by_a_critic_that_completions_teach(runs: Runs) -> None:
    rows = runs(
        "steps",
        2,
        objective={"name": "direct_advantage"},
        methods=[{"name": "dvp", "params": {"support": "engine", "rho": 0.2}}],
        advantage={"name": "step_advantage", "params": {"critic": "learned", "completions": 2}},
        critic={"loss": "bce", "optimizer": {"lr": 1e-3}},
        data={"step_delimiter": TOKENS_BEYOND_ASCII},
        rollout={"max_new_tokens": 6, "min_p": 0.2, "keep_sets": 511, "prompts_per_step": 4},
    )
    first, second = rows
    # A head of zeros says 1/2 of every state, which costs log 2 against any target.
    assert first["critic/loss"] == pytest.approx(0.693147, rel=1e-5)
    assert second["critic/loss"] != pytest.approx(0.693147, rel=1e-3)
    assert 0 < first["step_advantage/critic_error"] <= 0.5
    assert first["direct_advantage/log_ratio_abs"] == 0, "theta is old before the only mini-batch"
    assert first["direct_advantage/residual_abs"] > 0
    for row in rows:
        assert 0 < row["dvp/kept_mass_mean"] < 1
        assert row["dvp/kept_mass_mean"] == pytest.approx(row["sampling/kept_mass"], abs=1e-3), "both engines pruned by the same rule"
        assert row["dvp/outside_share"] < 0.01
    runs.check_replay("steps", rows)


def test_in_bypass_old_is_mu(runs: Runs) -> None:
    rows = runs(
        "bypass",
        1,
        objective={"name": "ppo"},
        methods=[{"name": "dvp", "params": {"support": "keep_sets", "rho": 0.2}}],
        rollout={"min_p": 0.2, "keep_sets": 511},
        train={"mini_batches": 2, "old_policy": "behaviour"},
    )
    for row in rows:
        assert row["mismatch/k3_trained"] == 0, "old and mu are the same numbers"
        assert 0 < row["dvp/kept_mass_mean"] < 1
        assert row["grad_norm"] > 0


def checksums(engine: Fleet) -> dict[str, str]:
    """The server's, by tensor."""
    (reply,) = engine.command("/weights_checker", [{"action": "checksum"}], timeout=60).result()
    return dict(reply["ranks"][0]["checksums"])


def test_a_rejected_step_leaves_no_trace_but_its_version(runs: Runs) -> None:
    """The trainer prunes and the engine does not, so theta says more of every token than mu: T-hat is below 0 where any answer is right.

    Answers of one token are empty, hence right, half the time.
    """
    start = load_file(runs.model / "model.safetensors")
    mipu = {"prompts": 12, "samples": 2, "tolerance_start": 0.0, "tolerance_end": 0.0}
    methods = [{"name": "mipu", "params": mipu}, {"name": "dvp", "params": {"support": "unpruned", "rho": 0.5}}]
    fields: dict[str, Any] = {"objective": {"name": "ppo"}, "methods": methods, "checkpoint": {"export": True}}
    rows = runs("mipu", 2, rollout={"max_new_tokens": 1}, **fields)
    for row in rows:
        assert row["grad_norm"] > 0, "there was something to take back"
        assert row["mipu/gap"] < 0
        assert (row["mipu/accepted"], row["mipu/forced"]) == (0, 0)
    assert [row["weight_version"] for row in rows] == [2, 4], "each step pushed twice: its candidate, and what was before it"
    found = load_file(runs.folder("mipu") / "hf/model.safetensors")
    assert found.keys() == start.keys()
    assert all(found[name].equal(start[name]) for name in start), "the trainer's weights, to the last bit"
    state = runs.state("mipu", 2)
    assert (state["step"], state["optimizer_step"], state["weight_version"]) == (2, 0, 4)
    # 12 validation prompts are two batches of 8: three batches a step
    assert state["prompt_batches"] == 6
    assert state["schedules"]["mipu"] == {"steps": 2, "consecutive_rollbacks": 2, "rollbacks": 2}
    runs.check_replay("mipu", rows)
    served = checksums(runs.engine)

    with Fleet.connect(runs.engine.urls, runs.engine.config, ModelConfig(path=str(runs.model)), routes=True) as own:
        folder = runs.root / "start"
        sync = DiskSync(own, SyncConfig(verify="always"), model_path=runs.model, folder=folder, dtype=torch.float32, experts=8)
        sync.push(iter(start.items()), 5)
    assert served == checksums(runs.engine), "the server's weights, to the last bit"
