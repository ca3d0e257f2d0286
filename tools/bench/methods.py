"""Trains every method for real steps in the quickstart's setting and writes docs/methods/index.md: what each does in the same time.

    bash examples/quickstart.sh                                    # once: makes the warm model and the data
    python tools/bench/methods.py                                  # every method; rows in docs/methods/rows.json are not run again
    python tools/bench/methods.py --only ppo gspo --fresh          # these alone, anew
    python tools/bench/methods.py --write                          # the page from the rows that there are

One SGLang server (bf16) and one fp32 trainer, two cores. Every method starts from the same warm weights and sees the same prompts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from megatron_rl.command_line import parse_config
from megatron_rl.loop import train
from megatron_rl.methods.catalog import METHODS
from megatron_rl.methods.describe import label
from megatron_rl.methods.objective import Kind
from megatron_rl.preflight import check_config

ROOT = Path(__file__).resolve().parents[2]
STEPS, PROMPTS, SAMPLES, HELD_OUT, EDGE = 20, 32, 8, 256, 4
CONTEXT = 128
AT_MU = {"cppo", "direct_advantage", "dppo", "drpo", "epic", "minirl", "minpro", "nfpo", "policy_gradient", "vespo"}
"""Objectives whose own weight or base is the engine's policy: `tis` on top would apply old/mu twice."""


@dataclass(frozen=True)
class Row:
    """One run of the table."""

    name: str
    """The method it shows."""
    setting: str
    """What else was set, for people."""
    options: tuple[str, ...]
    """Command-line options on top of the quickstart's."""


def _yaml(value: Any) -> str:
    return json.dumps(value)


def rows() -> list[Row]:
    """Every method of the catalog but `nll`, which needs no reward."""
    found: list[Row] = []
    for name, method in sorted(METHODS.items(), key=lambda item: (get_args(Kind).index(item[1].kind), item[0])):
        if name != "nll":
            found += [Row(name, setting, options) for setting, options in _settings(name, method.kind)]
    return found


def _settings(name: str, kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    steps = ("--data.step_delimiter", ";")
    warm = ("--reference.path", "{warm}")
    ppo = ("--objective", _yaml({"name": "ppo"}))
    if kind == "objective":
        extra: tuple[str, ...] = steps if name in ("sorl", "direct_advantage") else ()
        corrections = [] if name in AT_MU else [{"name": "tis"}]
        if name == "direct_advantage":
            extra += ("--advantage", _yaml({"name": "step_advantage"}))
        yield (
            ("alone" if name in AT_MU else "with tis"),
            ("--objective", _yaml({"name": name}), "--corrections", _yaml(corrections), *extra),
        )
    elif kind in ("correction", "penalty"):
        base = "policy_gradient" if name == "trm" else "grpo"
        stacked = [{"name": name}] if kind == "correction" else [{"name": "tis"}, {"name": name}]
        yield f"on {base}", ("--objective", _yaml({"name": base}), "--corrections", _yaml(stacked), *(warm if kind == "penalty" else ()))
    elif name == "dvp":
        for support in ("engine", "keep_sets", "unpruned"):
            engine = () if support == "unpruned" else ("--rollout.min_p", "0.001", "--rollout.keep_sets", "512")
            yield f"{support}, rho 1e-3", ("--methods", _yaml([{"name": name, "params": {"rho": 0.001, "support": support}}]), *engine)
    elif name == "keep_sets":
        truncated = ("--rollout.top_p", "0.9", "--rollout.top_k", "32", "--rollout.keep_sets", "32")
        yield "top_p 0.9, top_k 32", ("--methods", _yaml([{"name": name}]), *truncated)
    elif name == "gae":
        yield (
            "ppo, critic warmed up for 5 steps",
            (*ppo, "--advantage", _yaml({"name": name}), "--critic.warmup_steps", "5", "--critic.optimizer.lr", "3e-4"),
        )
    elif name == "step_advantage":
        learned = _yaml({"name": name, "params": {"critic": "learned"}})
        critic = ("--critic.loss", "bce", "--critic.optimizer.lr", "3e-4")
        yield (
            "direct_advantage, learned critic",
            ("--objective", _yaml({"name": "direct_advantage"}), "--corrections", "[]", "--advantage", learned, *critic, *steps),
        )
    elif name == "group":
        yield (
            "leave-one-out, no std",
            (*ppo, "--advantage", _yaml({"name": name, "params": {"baseline": "leave-one-out", "scale_by_std": False}})),
        )
    else:
        params: dict[str, Any] = {
            "overlong": {"buffer": 8},
            "length_lr": {"baseline_steps": 5, "cooldown": 5},
            "mipu": {"prompts": 16, "samples": 4},
        }.get(name, {})
        objective = ("--objective", _yaml({"name": "dapo_dynamic" if name == "dynamic_sampling" else "ppo"}))
        yield (
            "on ppo" if name != "dynamic_sampling" else "on dapo_dynamic",
            (*objective, "--methods", _yaml([{"name": name, "params": params}]), *(warm if name == "kl_in_reward" else ())),
        )


def key(row: Row) -> str:
    return f"{row.name} ({row.setting})"


@contextmanager
def server(quickstart: Path, log: Path) -> Iterator[str]:
    """One server for all rows; each row pushes its own weights before it samples."""
    command = [sys.executable, "-m", "megatron_rl", "rollout", "serve", *_common(quickstart), "--rollout.launch", "1"]
    command += ["--data.max_prompt_tokens", str(CONTEXT - 32), "--logging.dir", str(log / "server")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            url = next((line.strip() for line in process.stdout if line.startswith("http")), None)
            if url is None:
                raise SystemExit(f"the server ended; see {log / 'server'}")
            yield url
        finally:
            process.terminate()


def _common(quickstart: Path) -> list[str]:
    files = {"model.path": "warm", "data.path": "data/train.jsonl", "data.eval_path": "data/eval.jsonl"}
    located = [x for name, file in files.items() for x in (f"--{name}", str(quickstart / file))]
    return ["--config", str(ROOT / "examples/configs/quickstart.yaml"), *located, "--parallel.tensor", "1", "--parallel.expert", "1"]


def run(row: Row, quickstart: Path, url: str, work: Path) -> dict[str, Any]:
    """Trains one row.

    Raises:
        SystemExit: it failed.
    """
    folder = work / key(row).replace(" ", "_").replace("/", "_")
    shutil.rmtree(folder, ignore_errors=True)
    settings = {
        "rollout.urls": f"[{url}]", "rollout.prompts_per_step": PROMPTS, "rollout.samples_per_prompt": SAMPLES, "train.steps": STEPS,
        "data.eval_size": HELD_OUT, "logging.dir": folder, "logging.tensorboard": "false", "logging.progress": "none",
        "checkpoint.export": "false", "checkpoint.save_optimizer": "false", "replay.probe_every": STEPS,
    }  # fmt: skip
    options = [x for name, value in settings.items() for x in (f"--{name}", str(value))]
    options += [option.replace("{warm}", str(quickstart / "warm")) for option in row.options]
    config = parse_config("methods", __doc__ or "", [*_common(quickstart), *options])
    check_config(config)
    # A process of its own, forked so that it need not import anything: gloo's threads outlive the groups they serve.
    child = multiprocessing.get_context("fork").Process(target=train, args=(config,))
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit(f"{key(row)} failed; see above")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    shutil.rmtree(folder / "checkpoints")
    steps = [m for m in metrics if "reward/mean" in m]
    return {
        "steps": len(steps),
        "reward_before": statistics.fmean(m["reward/mean"] for m in steps[:EDGE]),
        "reward_after": statistics.fmean(m["reward/mean"] for m in steps[-EDGE:]),
        "held_out_before": summary["pass_rate_before"],
        "held_out_after": summary["pass_rate_after"],
        "k3": statistics.fmean(m["mismatch/k3_trained"] for m in steps if "mismatch/k3_trained" in m),
        "acceptance": _acceptance(row.name, steps),
        "seconds": statistics.median(m["seconds/step"] for m in steps),
        "load": os.getloadavg()[0],
    }


def _acceptance(name: str, steps: Sequence[dict[str, float]]) -> float | None:
    """Mean share of tokens (of steps, for step-level methods) that the method let through; None where it drops nothing."""
    for good in ("kept_share", "accepted_share", "accepted"):
        if any(f"{name}/{good}" in m for m in steps):
            return statistics.fmean(m[f"{name}/{good}"] for m in steps if f"{name}/{good}" in m)
    losses = [
        n for m in steps[:1] for n in m if n.startswith(f"{name}/") and ("clip_share" in n or "masked_share" in n or "dual_clip" in n)
    ]
    return 1 - statistics.fmean(sum(m.get(n, 0.0) for n in losses) for m in steps) if losses else None


HEADER = f"""# Methods

Every method, by kind, and what {STEPS} real steps with it do. Each line is a run of its own from the same warm model: one SGLang server in
bf16, one fp32 trainer on two cores, {PROMPTS} prompts x {SAMPLES} samples a step, two optimizer steps, R3 replay, rate 3e-4 falling
to 3e-5, otherwise [`examples/configs/quickstart.yaml`](../../examples/configs/quickstart.yaml). Made by `python tools/bench/methods.py`.

{STEPS} steps show that a method trains and what it costs. They do not rank methods: reward is the mean over {EDGE} steps
({EDGE * PROMPTS * SAMPLES} answers, standard error about 0.014), held-out the pass rate of {HELD_OUT} sampled answers (about 0.03).
*kept*: share of tokens (mipu: of steps) that clips and masks let through. k3: mean e^d - 1 - d, d = old - engine log-prob.
Labels: [N] not located, [I] partly inferred, [A] abstract only; see each page.
"""


def page(results: dict[str, dict[str, Any]]) -> str:
    """docs/methods/index.md."""
    parts = [HEADER, _machine()]
    for kind in get_args(Kind):
        mine = [r for r in rows() if METHODS[r.name].kind == kind and key(r) in results]
        if not mine:
            continue
        parts.append(f"\n## {kind.capitalize()}\n")
        parts.append("| method | setting | reward, first and last steps | held-out | k3 | kept | s a step | load |\n" + "|---" * 8 + "|")
        parts += [_line(row, results[key(row)]) for row in mine]
    due = [f"[{name}]({name}.md)" for name in dict.fromkeys(r.name for r in rows() if key(r) not in results)]
    if due:
        parts.append(f"\n## Not run in this setting yet\n\n{', '.join(due)}.\n")
    parts.append("\n`nll`, the objective of `sft`, is in the [quickstart](../benchmarks.md).\n")
    return "\n".join(parts)


def _machine() -> str:
    return (
        f"Machine: {platform.machine()}, {os.cpu_count()} cores, no GPU. Seconds are the median of a step, with the load average beside\n"
        "them: a run alone on the machine makes a load of 1.5 to 2; at more, other work shared the cores and the seconds are too many.\n"
    )


def _line(row: Row, r: dict[str, Any]) -> str:
    mark = label(METHODS[row.name])
    name = f"[{row.name}]({row.name}.md)" + (f" {mark.split()[0]}" if mark else "")
    kept = "" if r["acceptance"] is None else f"{r['acceptance']:.3f}"
    reward = f"{r['reward_before']:.3f} → {r['reward_after']:.3f}"
    held_out = f"{r['held_out_before']:.3f} → {r['held_out_after']:.3f}"
    return f"| {name} | {row.setting} | {reward} | {held_out} | {r['k3']:.1e} | {kept} | {r['seconds']:.2f} | {r['load']:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quickstart", type=Path, default=ROOT / "runs/quickstart", help="folder that examples/quickstart.sh made")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/methods", help="logs go here")
    parser.add_argument("--only", nargs="*", help="methods by name; all by default")
    parser.add_argument("--fresh", action="store_true", help="run rows again that are there")
    parser.add_argument("--write", action="store_true", help="only write the page")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the server goes too
    args.out.mkdir(parents=True, exist_ok=True)
    file = ROOT / "docs/methods/rows.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else {}
    wanted = [r for r in rows() if not args.only or r.name in args.only]
    due = [] if args.write else [r for r in wanted if args.fresh or key(r) not in results]
    if due:
        with server(args.quickstart, args.out) as url:
            for row in due:
                results[key(row)] = run(row, args.quickstart, url, args.out)
                file.write_text(json.dumps(results, indent=1) + "\n")
                print(key(row), {k: round(v, 5) for k, v in results[key(row)].items() if v is not None}, flush=True)
    (ROOT / "docs/methods/index.md").write_text(page(results))


if __name__ == "__main__":
    main()
