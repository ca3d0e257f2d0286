"""`megatron-rl lab measure`: engines sample, the trainer scores the same tokens under the grid, and the report is written.

Under torchrun every rank takes part in scoring; rank 0 alone has the engines, the prompts and the files.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import shutil
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..actor.parallel import Mesh, create_mesh, destroy_mesh, launch_context, prepare_process
from ..config import ModelFacts, check_against_model, read_model_facts
from ..data.prompts import PromptSource, load_tokenizer
from ..files import write_json
from ..methods.registry import build
from ..rewards.verifiers import build as build_verifier
from ..rewards.verifiers import score_all
from .batch import advantages, token_batch
from .conditions import Pass, conditions, passes
from .config import SHORT, EngineConfig, LabConfig, layout_name
from .engines import quantised_folder, sample
from .records import Condition, EngineSetting, Measurement, Rescored, Sampled, Statistics, otherwise
from .scoring import Answers, Scorer
from .summary import statistics, summarise
from .updates import optimizer_steps
from .versions import derive, perturbation

logger = logging.getLogger(__name__)


def measure_and_report(config: LabConfig, out: Path, command: str = "") -> list[Path]:
    """The whole of it; the files that were written, on rank 0."""
    prepare_process(config.threads)
    try:
        measurement = measure(config, out, command)
    finally:
        destroy_mesh()
    return [] if measurement is None else write(measurement, out)


def write(measurement: Measurement, out: Path) -> list[Path]:
    """measurement.json, summary.json and report.html into `out`."""
    from .report import write_report  # it imports plotting

    found = summarise(measurement)
    saved = measurement.save(out)
    write_json(out / "summary.json", found)
    return [saved, out / "summary.json", write_report(measurement, found, out)]


def measure(config: LabConfig, out: Path, command: str = "") -> Measurement | None:
    """Everything but the writing; None on ranks other than 0. Collective; leaves the process group to the caller.

    Raises:
        ValueError: a layout, a length or a checkpoint does not fit, before any server starts.
    """
    began = time.monotonic()
    mesh = create_mesh(config.parallel, config.seed)
    model = mesh.broadcast(_model(config, out) if mesh.is_main else None)
    facts = read_model_facts(model)
    check(config, facts, model)
    for parallel in config.grid.layouts:
        parallel.check_world_size(mesh.world_size)
    answered = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if answered < mesh.world_size:
        raise ValueError(f"rollout.prompts_per_step: {answered} answers are fewer than the {mesh.world_size} ranks; raise it")
    sampled = mesh.broadcast(_sample(config, model, out, facts) if mesh.is_main else None)
    answers, floor, origin = sampled
    folders = _folders(config, mesh, model, out, answers[config.main.name])
    rescored = _grid(config, mesh, model, out, answers, folders, floor)
    if launch_context()[0]:
        return None
    samples = {one.name: Sampled(_setting(one), answers[one.name].batch, rescored[one.name]) for one in config.settings}
    meta = _meta(config, model, facts, command) | {"advantages": origin, "seconds": round(time.monotonic() - began, 1)}
    return Measurement(samples, floor, meta)


def check(config: LabConfig, facts: ModelFacts, model: str) -> None:
    """Raises ValueError where a layout, a length or a quantisation cannot work for this model."""
    for parallel in (config.parallel, *config.grid.layouts):
        check_against_model(config.training(config.main, config.grid.dtypes[0], parallel, model), facts)
    build(config.lag.objective, config.lag.corrections)


def _model(config: LabConfig, out: Path) -> str:
    """The policy's folder; forgets the weights of an earlier measurement."""
    shutil.rmtree(out / "weights", ignore_errors=True)
    if config.model.path is not None:
        return config.model.path
    from .tiny import TinyModel, make_tiny_moe  # imports transformers

    target = out / "model"
    shutil.rmtree(target, ignore_errors=True)
    return str(make_tiny_moe(target, TinyModel(**config.model.tiny)))


def _sample(config: LabConfig, model: str, out: Path, facts: ModelFacts) -> tuple[dict[str, Answers], dict[str, Statistics], str]:
    """What every engine setting sampled and was worth, the engines' own floors, and where advantages come from."""
    source = PromptSource(config.data, load_tokenizer(model), config.seed, split="train")
    prompts = source.batch(0, config.rollout.prompts_per_step)
    found = sample(config, model, out, prompts, routes=facts.is_moe, note=logger.info)
    verifier = build_verifier(config.reward, config.data)
    answers: dict[str, Answers] = {}
    floor: dict[str, Statistics] = {}
    origin = "rewards"
    try:
        for one in config.settings:
            trajectories, own = found[one.name]
            judged = tuple(score_all(verifier, trajectories))
            taken, whence = advantages(judged, config.seed)
            origin = whence if one == config.main else origin
            answers[one.name] = Answers(one, judged, token_batch(judged, taken))
            floor |= {f"{one.name}/{what}": values for what, values in own.items()}
    finally:
        verifier.close()
    return answers, floor, origin


def _folders(config: LabConfig, mesh: Mesh, model: str, out: Path, answers: Answers) -> dict[int, str]:
    """A checkpoint folder for each weight version that the trainer is ahead. Collective."""
    lag, weights = config.lag, out / "weights"
    if lag.source == "folders":
        return {0: model} | dict(zip(lag.lags, lag.folders, strict=True))
    if lag.source == "steps" and lag.lags:
        scorer = Scorer(config, mesh, config.parallel, config.grid.dtypes[0], model, trains=True)
        return {0: model} | optimizer_steps(config, scorer, answers, model, weights)
    if mesh.is_main:
        for k in lag.lags:
            derive(model, weights / f"lag_{k}", perturbation(config.seed, k, lag.noise))
    mesh.barrier()
    return {0: model} | {k: str(weights / f"lag_{k}") for k in lag.lags}


def _grid(
    config: LabConfig,
    mesh: Mesh,
    model: str,
    out: Path,
    answers: dict[str, Answers],
    folders: dict[int, str],
    floor: dict[str, Statistics],
) -> dict[str, dict[str, Rescored]]:
    """Every condition of every engine setting; adds the trainer's floors to `floor`. Collective."""
    moe_layers = 0
    rescored: dict[str, dict[str, Rescored]] = {name: {} for name in answers}
    scorer: Scorer | None = None
    standing: tuple[Any, ...] = ()
    for one in passes(config):
        if standing != (one.parallel, one.dtype):
            standing = (one.parallel, one.dtype)
            scorer = None  # one model in memory at a time
            if one.parallel != config.parallel:
                mesh = create_mesh(one.parallel, config.seed)
            scorer = Scorer(config, mesh, one.parallel, one.dtype, model)
            moe_layers = scorer.actor.moe_layers
        assert scorer is not None
        for engine in config.settings:
            wanted = conditions(config, one, engine, moe_layers)
            if not wanted:
                continue
            scorer.load(quantised_folder(config, model, out, engine) if one.quantised else folders[one.lag])
            if mesh.is_main:
                logger.info("scoring %s: %s", engine.name, ", ".join(c.name for c in wanted))
            found = score(scorer, answers[engine.name], wanted)
            rescored[engine.name] |= found
            if one == Pass(config.parallel, config.grid.dtypes[0]):
                floor |= {f"{engine.name}/{what}": value for what, value in trainer_floor(scorer, answers[engine.name], found).items()}
    return rescored


def score(scorer: Scorer, answers: Answers, wanted: Sequence[Condition]) -> dict[str, Rescored]:
    """Those conditions, with the weights that are loaded. Collective."""
    scorer.aim(answers.engine)
    feed = scorer.feed(answers)
    return {one.name: scorer.score(answers, one, feed) for one in wanted}


def trainer_floor(scorer: Scorer, answers: Answers, found: dict[str, Rescored]) -> dict[str, Statistics]:
    """The trainer against itself: the same condition again, and in other micro-batches; live and replayed. Collective."""
    batch, out = answers.batch, {}
    feeds = {"repeated": (scorer.feed(answers), False), "other packing": (scorer.feed(answers, other=True), True)}
    for first in found.values():
        if first.condition.replayed_layers is not None:
            continue
        for what, (feed, other) in feeds.items():
            again = scorer.score(answers, first.condition, feed, other=other)
            values = statistics((again.logp_T.astype("float64") - first.logp_T)[batch.mask_T])
            if first.routes_TLK is not None and again.routes_TLK is not None:
                values["route_mismatch_share"] = float(otherwise(first.routes_TLK, again.routes_TLK).any(axis=1).mean())
            out[f"trainer {what}, {first.condition.name}"] = values
    return out


def _setting(one: EngineConfig) -> EngineSetting:
    return EngineSetting(one.name, SHORT[one.dtype], one.quantisation, one.temperature, one.top_p, one.top_k, one.min_p)


def _meta(config: LabConfig, model: str, facts: ModelFacts, command: str) -> dict[str, Any]:
    return {
        "model": model,
        "architecture": facts.architecture,
        "layers": facts.layers,
        "experts": facts.experts,
        "machine": f"{platform.processor() or platform.machine()}, threads a rank: {torch.get_num_threads()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "layout": layout_name(config.parallel),
        "versions": {name: version(name) for name in ("torch", "megatron-core", "sglang", "transformers")},
        "command": command,
        "seed": config.seed,
        "config": dataclasses.asdict(config),
    }
