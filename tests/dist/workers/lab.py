"""Run on forked ranks: the laboratory's trainer side, with the trainer itself in the engine's place, so that every cause is known.

usage: lab.py causes FOLDER      one process: FOLDER/causes.json, and FOLDER/answers.pickle for the other one
       lab.py layout FOLDER      the answers scored in TP2 x EP2: FOLDER/layout.json
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.actor.parallel import create_mesh, destroy_mesh, prepare_process
from megatron_rl.config import DataConfig, ParallelConfig, RolloutConfig
from megatron_rl.lab.acceptance import table
from megatron_rl.lab.attribution import attribute, by_layer, explain
from megatron_rl.lab.batch import token_batch
from megatron_rl.lab.conditions import Pass, conditions
from megatron_rl.lab.config import EngineConfig, LabConfig, LagConfig
from megatron_rl.lab.measure import score, trainer_floor
from megatron_rl.lab.records import Condition, EngineSetting, Measurement, Rescored, Sampled
from megatron_rl.lab.scoring import Answers, Scorer
from megatron_rl.lab.summary import summarise
from megatron_rl.lab.tiny import TinyModel, make_tiny_moe
from megatron_rl.lab.versions import derive, perturbation
from megatron_rl.types import Prompt, Trajectory

SIZES = TinyModel(vocab=300, hidden=64, layers=3, heads=4, kv_heads=2, head_dim=16, ffn=32, init=0.1, head=2.0)
FORCED = 1
"""The layer whose route is forced."""
ENGINE = EngineConfig("trainer", dtype="float32")
LIVE, R3 = Condition("live", "none", "fp32", "one process"), Condition("R3", "R3", "fp32", "one process")


def lab_config(parallel: ParallelConfig) -> LabConfig:
    return LabConfig(
        parallel=parallel,
        rollout=RolloutConfig(max_new_tokens=32, prompts_per_step=4, samples_per_prompt=2),
        engines=(ENGINE,),
        lag=LagConfig(source="perturb", lags=(1,), noise=0.002),
        data=DataConfig(max_prompt_tokens=16),
        tokens_per_micro_batch=128,
    )


def made_up_answers() -> Answers:
    """Random tokens; what the engine said of them is filled in by `as_engine`."""
    rng, trajectories = np.random.default_rng(0), []
    for i in range(12):
        n = int(rng.integers(14, 40))
        mask = np.arange(n) >= 6
        tokens = rng.integers(3, 259, n).astype(np.int32)
        trajectories.append(
            Trajectory(
                prompt=Prompt(str(i // 4), tokens[:6], "", ""),
                group=str(i // 4),
                tokens=tokens,
                loss_mask=mask,
                behaviour_logp=np.where(mask, -1.0, np.nan).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                turns=np.where(mask, 0, -1).astype(np.int32),
                routes=np.tile(np.arange(SIZES.topk, dtype=np.uint8), (n - 1, SIZES.layers, 1)),
                finish_reason="stop",
                text="",
                reward=float(i % 2),
            )
        )
    return with_engine(trajectories, None)


def with_engine(trajectories: list[Trajectory], scored: Rescored | None, routes_TLK: Any = None) -> Answers:
    """The answers as if the engine had said of them what the trainer said, on those routes."""
    out, at = [], 0
    for t in trajectories:
        here = slice(at, at + len(t.tokens) - 1)
        at = here.stop
        if scored is not None:
            said = np.where(t.loss_mask, np.concatenate([[0], scored.logp_T[here]]), np.nan).astype(np.float32)
            t = dataclasses.replace(t, behaviour_logp=said)
        out.append(t if routes_TLK is None else dataclasses.replace(t, routes=routes_TLK[here]))
    signs = np.array([1.0 if i % 2 else -1.0 for i in range(len(out))], dtype=np.float32)
    return Answers(ENGINE, tuple(out), token_batch(out, signs))


def forced(routes_TLK: Any) -> Any:
    """The routes with one layer's first expert replaced by the next one that the token does not use."""
    out = routes_TLK.copy()
    for row in out[:, FORCED]:
        row[0] = next(e for e in range(SIZES.experts) if e not in row)
    return out


def causes(folder: Path) -> dict[str, Any]:
    config = lab_config(ParallelConfig())
    model = str(make_tiny_moe(folder / "model", SIZES))
    moved = str(derive(model, folder / "moved", perturbation(0, 1, config.lag.noise)))
    mesh = create_mesh(config.parallel)
    fp32 = Scorer(config, mesh, config.parallel, "float32", model)
    fp32.load(model)
    plain = made_up_answers()
    live = fp32.score(plain, LIVE, fp32.feed(plain))
    same = with_engine(list(plain.trajectories), live, live.routes_TLK)
    other_routes = forced(live.routes_TLK)
    replayed = with_engine(list(plain.trajectories), live, other_routes)
    at_other = fp32.score(replayed, R3, fp32.feed(replayed))
    rerouted = with_engine(list(plain.trajectories), at_other, other_routes)
    wanted = conditions(config, Pass(config.parallel, "float32"), ENGINE, SIZES.layers)
    lagging = conditions(config, Pass(config.parallel, "float32", 1), ENGINE, SIZES.layers)
    scored = {"routes": score(fp32, rerouted, wanted), "weights": score(fp32, same, wanted)}
    again = score(fp32, rerouted, wanted)
    floor = {f"trainer/{k.replace('trainer', 'engine')}": v for k, v in trainer_floor(fp32, rerouted, scored["routes"]).items()}
    fp32.load(moved)
    scored["weights"] |= score(fp32, same, lagging)
    bf16 = Scorer(config, mesh, config.parallel, "bfloat16", model)
    bf16.load(model)
    rounded = bf16.score(same, dataclasses.replace(R3, dtype="bf16"), bf16.feed(same))
    dtype = with_engine(list(plain.trajectories), rounded, live.routes_TLK)
    fp32.load(model)
    scored["dtype"] = score(fp32, dtype, wanted)
    (folder / "answers.pickle").write_bytes(pickle.dumps(rerouted))
    samples = {
        "routes": sampled(rerouted, scored["routes"]),
        "weights": sampled(same, scored["weights"]),
        "dtype": sampled(dtype, scored["dtype"]),
    }
    names = {"routes": "live fp32", "weights": "live fp32 lag 1", "dtype": "live fp32"}
    return {
        "explained": {cause: explain(samples[cause], name) for cause, name in names.items()},
        "left": {cause: left_over(samples[cause], name) for cause, name in names.items()},
        "rspo": next(row for row in table(samples["weights"], *lagged(scored["weights"])) if row["method"] == "rspo"),
        "layers": by_layer(samples["routes"], names["routes"]),
        "summary": summarise(Measurement({"trainer": samples["routes"]}, floor)),
        "again": summarise(Measurement({"trainer": sampled(rerouted, again)}, floor)),
    }


def lagged(scored: dict[str, Rescored]) -> tuple[Rescored, Rescored]:
    return scored["R3 fp32 lag 1"], scored["R3 fp32"]


def left_over(sample: Sampled, name: str) -> float:
    """Most that the parts of one token miss its log-ratio by."""
    found = attribute(sample, name)
    assert found is not None
    return float(np.abs(sum(found.parts.values()) - found.d_M).max())


def sampled(answers: Answers, scored: dict[str, Rescored]) -> Sampled:
    return Sampled(EngineSetting("trainer", "fp32"), answers.batch, scored)


def layout(folder: Path) -> dict[str, Any] | None:
    config = lab_config(ParallelConfig(tensor=2, expert=2))
    mesh = create_mesh(config.parallel)
    scorer = Scorer(config, mesh, config.parallel, "float32", str(folder / "model"))
    scorer.load(str(folder / "model"))
    answers: Answers = pickle.loads((folder / "answers.pickle").read_bytes())
    scored = score(scorer, answers, conditions(config, Pass(config.parallel, "float32"), ENGINE, SIZES.layers))
    return summarise(Measurement({"trainer": sampled(answers, scored)})) if mesh.is_main else None


def main() -> None:
    prepare_process(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    found = causes(folder) if what == "causes" else layout(folder)
    if found is not None:
        (folder / f"{what}.json").write_text(json.dumps(found, allow_nan=False))
    destroy_mesh()


if __name__ == "__main__":
    main()
