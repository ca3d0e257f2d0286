"""The command line: quick help, one-line errors with exit code 2, the torchrun line, and what the small commands print."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import cli, doctor
from megatron_rl.doctor import Check, Diagnosis, PatchState

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "configs" / "qwen3_30b_a3b_h100.yaml"
HELP = (
    [],
    ["train"],
    ["sft"],
    ["eval"],
    ["check"],
    ["rollout"],
    ["rollout", "serve"],
    ["convert"],
    ["convert", "hf-to-mcore"],
    ["convert", "mcore-to-hf"],
    ["convert", "inspect"],
    ["convert", "verify"],
    ["convert", "reshard"],
    ["lab"],
    ["lab", "report"],
    ["lab", "watch"],
    ["methods"],
    ["report"],
    ["doctor"],
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the numbers of Qwen3-30B-A3B and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text((ROOT / "examples/configs/qwen3_30b_a3b.json").read_text())
    return folder


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """What a command says on stderr when it ends with `code`."""
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.strip()


def test_help_at_any_level_imports_nothing_heavy() -> None:
    script = f"""
import sys, contextlib, io
from megatron_rl.cli import main
for words in {HELP!r}:
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    assert "usage: megatron-rl" in text.getvalue(), words
    heavy = [m for m in ("torch", "transformers", "sglang", "megatron", "numpy", "aiohttp") if m in sys.modules]
    assert not heavy, (words, heavy)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_is_quick() -> None:
    """Half a second is promised on an idle machine. The tests' is not: CPU seconds are counted, which contention stretches too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "megatron_rl", "train", "--help"], cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "Folder of a Hugging Face checkpoint" in done.stdout, "the fields' own words are the help"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.lr", "-1"], "optimizer.lr: -1.0 must be positive"),
        (["--optimizer.lr", "fast"], "optimizer.lr: 'fast' does not fit; use float"),
        (["--optimizer.lrr", "1"], "optimizer.lrr: there is no such key; did you mean optimizer.lr?"),
        (["--sync.mode", "tcp"], "sync.mode: 'tcp' does not fit; use one of disk, distributed"),
        (["--config", "/nowhere.yaml"], "config: File does not exist: '/nowhere.yaml'; see megatron-rl train --help"),
        (["--corrections", "[{nme: tis}]"], "corrections: an entry has the key 'nme', which does not exist; see megatron-rl train --help"),
        (["--replay.mode", "PR2"], "replay.mode: 'PR2' does not fit; use one of none, R2, R3"),
        (["--model.path", "/nowhere"], "model.path: '/nowhere' is not a folder; give one with a Hugging Face checkpoint"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "train", *arguments) == f"megatron-rl: error: {message}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--objective.name", "gpo"], "objective.name: 'gpo' is not a known objective; choose one of: acpo_adaptive, "),
        (["--objective.params", "{epsilon: 1}"], "objective.params.epsilon: grpo has no such parameter; it has: "),
        (["--corrections", "[{name: grpo}]"], "corrections[0].name: 'grpo' is not a known correction or penalty"),
    ],
)
def test_methods_are_checked_before_anything_starts(
    arguments: list[str], message: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(capsys, "train", "--model.path", str(model), *arguments).startswith(f"megatron-rl: error: {message}")


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_without_torchrun_the_line_to_use_is_printed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [command, "--parallel.tensor", "2", "--parallel.expert", "2", "--data.task_args", "{min_terms: 3}"]
    error = error_of(capsys, *arguments)
    assert error.startswith("megatron-rl: error: parallel: tensor 2 x pipeline 1 x context 1, expert 2 needs 2 ranks")
    line = shlex.split(error.splitlines()[1])
    assert line == ["torchrun", "--nproc-per-node", "2", "-m", "megatron_rl", *arguments]


def test_the_torchrun_line_of_a_layout_beyond_one_node_names_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    # Experts over 8 ranks, dense weights over 4, each in two stages: 16 ranks.
    arguments = ["train", "--parallel.tensor", "4", "--parallel.expert", "8", "--parallel.pipeline", "2"]
    line = error_of(capsys, *arguments).splitlines()[1]
    assert "torchrun --nnodes 2 --node-rank NODE_RANK --nproc-per-node 8 --master-addr MASTER -m megatron_rl train" in line


def test_a_conversion_over_ranks_prints_its_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", "hf-to-mcore", "models/a", "out", "--parallel.tensor", "2"]
    assert f"torchrun --nproc-per-node 2 -m megatron_rl {shlex.join(arguments)}" in error_of(capsys, *arguments)


def test_only_rank_0_says_what_every_rank_finds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank, expected in ((0, "parallel: 'tensor 2 x pipeline 1 x context 1' must divide the 3 ranks"), (1, ""), (2, "")):
        monkeypatch.setenv("RANK", str(rank))
        error = error_of(capsys, "train", "--parallel.tensor", "2")
        assert expected in error
        assert bool(expected) == bool(error)


def test_other_libraries_errors_keep_their_traceback() -> None:
    """A ValueError of torch or json is a bug for us to see; only our own messages are for users."""
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("nothing")
    assert not cli._is_message(caught.value)
    with pytest.raises(ValueError, match="unknown") as ours:
        cli.methods(["show", "nothing"])
    assert cli._is_message(ours.value)


def test_check_fits_the_example_and_refuses_uneven_prompts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["check", "--config", str(CONFIG), "--model.path", str(model)]
    assert cli.main(base) == 0
    assert "on 16 ranks: tensor 4, pipeline 2, context 1, expert 8, data 2" in capsys.readouterr().out
    # 48 ranks / (TP4 x PP2) are 6 data-parallel groups, which cannot share 64 prompts.
    error = error_of(capsys, *base, "--ranks", "48")
    assert "rollout.prompts_per_step: 64 must be a multiple of the 6 data-parallel groups that 48 ranks make" in error
    assert "must divide the 12 ranks" in error_of(capsys, *base, "--ranks", "12")


def test_serve_refuses_servers_that_run_already(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, "rollout", "serve", "--rollout.urls", '["http://a:1"]')
    assert error == "megatron-rl: error: rollout.urls: ['http://a:1'] run already; leave it empty to launch servers here"


def test_sft_needs_examples(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "data.path: None must name a .jsonl file" in error_of(capsys, "sft", "--model.path", str(model))


def test_methods_are_listed_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", "--json"]) == 0
    records = {record["name"]: record for record in json.loads(capsys.readouterr().out)}
    assert records["tis"]["kind"] == "correction"
    assert {p["name"]: p["default"] for p in records["tis"]["params"]} == {"level": "token", "pair": "old/mu", "cap": 2.0}
    assert all(p["doc"] for r in records.values() for p in r["params"]), "every parameter says what it is"
    assert cli.main(["methods", "show", "tis"]) == 0
    shown = capsys.readouterr().out
    assert "Largest weight." in shown
    assert "weight = min(kap, cap)" in shown, "the formula stands in the method's own file"
    assert error_of(capsys, "methods", "show", "tus").startswith("megatron-rl: error: method: 'tus' is unknown; choose one of: ")


def test_report_names_what_it_misses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "metrics.jsonl" in error_of(capsys, "report", str(tmp_path))


@pytest.mark.slow
def test_doctor_says_what_is_here() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl", "doctor", "--json", "--no-engine"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    checks = {(c["area"], c["name"]): c for c in found["checks"]}
    assert checks["versions", "torch"]["status"] == "ok"
    assert checks["actor", "layers"]["status"] == "ok", checks["actor", "layers"]
    assert all(c["remedy"] for c in found["checks"] if c["status"] == "missing")
    assert {area for area, _ in checks} >= {"versions", "disk", "memory", "ports", "devices", "threads", "actor", "engine"}
    if "none" in checks["devices", "cuda"]["value"]:
        states = {p["name"]: p["state"] for p in found["patches"]}
        assert states["rng-fork"] == "active"
        assert all(p["reason"] for p in found["patches"])


def test_doctor_gives_the_remedy_for_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", {"no-such-distribution": "pip install it"})
    missing = [check for check in doctor._versions() if check.status == "missing"]
    assert [(check.name, check.value) for check in missing] == [("no-such-distribution", "not installed")]
    full = doctor._at_least("disk", "free", 1 << 30, 5 << 30, "free some space")
    broken = tuple(doctor._broken((PatchState("sglang", "host-buffers", "untested", "why"),)))
    diagnosis = Diagnosis((Check("versions", "python", "3.11"), *missing, full, *broken), ())
    assert not diagnosis.ok
    doctor.render(diagnosis)
    printed = capsys.readouterr().out
    for text in ("pip install it", "free some space", "1.0 GiB, less than 5", "tools/check_patches.py", "something is missing"):
        assert text in printed
