"""What is checked before a process group or a server starts, cheapest first."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Mapping, Sequence

from .command_line import UserError
from .config import Config, ModelFacts, ParallelConfig, check_against_model, read_model_facts

GPUS_PER_NODE = 8
"""Only for the torchrun line that a message proposes."""


def check_config(config: Config, *, supervised: bool = False) -> ModelFacts:
    """Everything a configuration says about its model and its method.

    Args:
        supervised: for `sft`, which replays nothing and reads data.path.

    Raises:
        UserError: names the field, the value and the remedy.
    """
    if supervised:
        config = dataclasses.replace(config, replay=dataclasses.replace(config.replay, mode="none"))
        if config.data.path is None:
            raise UserError('data.path: None must name a .jsonl file with one {"prompt": ..., "completion": ...} a line')
        for field, listed in (("corrections", config.corrections), ("methods", config.methods)):
            if listed:
                names = ", ".join(one.name for one in listed)
                raise UserError(f"{field}: {names} needs a policy that sampled, and sft has examples; set it to []")
    try:
        facts = read_model_facts(config.model.path)
        check_against_model(config, facts)
        from .methods.requirements import configured  # imports torch

        configured(config, facts)
    except ValueError as error:
        raise UserError(str(error)) from error
    return facts


def ranks_needed(parallel: ParallelConfig) -> int:
    """The fewest ranks the layout fits: dense weights span TP x PP x CP, experts EP x expert TP x PP."""
    return math.lcm(parallel.model_ranks, parallel.expert * parallel.expert_tensor_size * parallel.pipeline)


def check_ranks(parallel: ParallelConfig, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """The layout against what torchrun started, or against one process.

    Args:
        parallel: the layout.
        command: the sub-command and the user's own arguments, for the line that a message proposes.
        environment: where torchrun leaves RANK and WORLD_SIZE.

    Raises:
        UserError: it does not fit; without torchrun, with the torchrun line to use.
    """
    needed = ranks_needed(parallel)
    if "RANK" not in environment and needed > 1:
        raise UserError(
            f"parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} x context {parallel.context}, expert {parallel.expert} "
            f"needs {needed} ranks (or a multiple), but this was started without torchrun; use\n  {torchrun_line(needed, command)}"
        )
    _check_world_size(parallel, started_ranks(environment))


def started_ranks(environment: Mapping[str, str]) -> int:
    """How many ranks torchrun started; 1 without torchrun."""
    return int(environment.get("WORLD_SIZE", "1"))


def check_world(config: Config, ranks: int, *, supervised: bool = False) -> None:
    """Raises UserError unless the layout fits that many ranks and every data-parallel group gets equally many prompts."""
    _check_world_size(config.parallel, ranks)
    groups = ranks // config.parallel.model_ranks
    if not supervised and config.rollout.prompts_per_step % groups:
        raise UserError(
            f"rollout.prompts_per_step: {config.rollout.prompts_per_step} must be a multiple of the {groups} data-parallel groups "
            f"that {ranks} ranks make with this layout"
        )


def _check_world_size(parallel: ParallelConfig, ranks: int) -> None:
    try:
        parallel.check_world_size(ranks)
    except ValueError as error:
        raise UserError(str(error)) from error


def torchrun_line(ranks: int, command: Sequence[str]) -> str:
    """The command that starts `python -m megatron_rl <command>` on that many ranks."""
    module = f"-m megatron_rl {shlex.join(command)}"
    if ranks <= GPUS_PER_NODE:
        return f"torchrun --nproc-per-node {ranks} {module}"
    nodes = math.ceil(ranks / GPUS_PER_NODE)
    return f"torchrun --nnodes {nodes} --node-rank NODE_RANK --nproc-per-node {ranks // nodes} --master-addr MASTER {module}"
