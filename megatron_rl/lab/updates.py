"""Weight versions that the engine has not seen, made by real optimizer steps on what it sampled."""

from __future__ import annotations

import shutil
from pathlib import Path

from ..actor.actor import with_old
from ..actor.optimizer import learning_rate
from ..config import read_model_facts
from ..methods.requirements import configured
from ..routing.replay import Mode
from .config import LabConfig
from .scoring import Answers, Scorer


def optimizer_steps(config: LabConfig, scorer: Scorer, answers: Answers, model: str, folder: Path) -> dict[int, str]:
    """Takes max(lags) steps on the answers and writes the weights after each of lags to <folder>/lag_<k>. Collective.

    Every step is on the whole batch, with old log-probs of the start and, where the grid replays R3, on the engine's routes.

    Raises:
        ValueError: the objective or a correction needs what the laboratory does not provide.
    """
    training = config.training(answers.engine, config.grid.dtypes[0], config.parallel, model)
    stack, _ = configured(training, read_model_facts(model))
    scorer.load(model)
    scorer.aim(answers.engine)
    feed = scorer.feed(answers)
    routing: Mode = "replay" if "R3" in config.grid.replay and scorer.actor.experts else "live"
    batches = with_old(feed.micro_batches, scorer.actor.score(feed.micro_batches, routing))
    written = {}
    for step in range(max(config.lag.lags)):
        lr = learning_rate(config.lag.optimizer, step, max(config.lag.lags))
        scorer.actor.update(batches, stack, feed.over, lr, routing=routing, salt=config.seed + step)
        if step + 1 in config.lag.lags:
            target = folder / f"lag_{step + 1}"
            if scorer.mesh.is_main:
                shutil.rmtree(target, ignore_errors=True)
            scorer.actor.save_hf(target, model)
            written[step + 1] = str(target)
    return written
