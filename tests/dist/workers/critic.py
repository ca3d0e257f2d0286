"""Run on forked ranks: a critic's values, two updates and a checkpoint under each layout asked for; writes what it found.

usage: critic.py MODEL CHECKPOINTS OUT.json '{"name": {"parallel": {...}, "budget": ..., "loss": ..., "head": true, "save"|"load": FOLDER}}'
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_rl.actor.parallel import create_mesh, destroy_mesh, prepare_process
from tools.layouts.batch import make_batch

LR = 3e-4


def targets(batch: Any, seed: int = 1) -> Any:
    """Returns between 0 and 1 at three loss tokens of four; the others are no targets. Values are filled in by the critic."""
    import dataclasses

    rng = np.random.default_rng(seed)
    returns = [np.where(t.loss_mask & (rng.random(len(t.tokens)) < 0.75), rng.random(len(t.tokens)), np.nan) for t in batch.trajectories]
    return dataclasses.replace(batch, returns=tuple(r.astype(np.float32) for r in returns))


class Case:
    """One critic (and, where checkpoints are asked for, an actor) in one layout, with its share of the batch."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from megatron_rl.actor.actor import Actor
        from megatron_rl.actor.critic import Critic
        from megatron_rl.config import Config, CriticConfig, ModelConfig, OptimizerConfig, ParallelConfig
        from megatron_rl.convert.families import family_for

        parallel = ParallelConfig(**options.get("parallel", {}))
        optimizer = OptimizerConfig(lr=LR, clip_grad=0.0 if options.get("head") else 1.0)
        self.config = Config(
            model=ModelConfig(path=model, dtype="float32"),
            parallel=parallel,
            critic=CriticConfig(optimizer=optimizer, loss=options.get("loss", "square"), clip=0.01),
        )
        self.hf = json.loads((Path(model) / "config.json").read_text())
        self.mesh = create_mesh(parallel)
        family = family_for(self.hf)
        self.models: dict[str, Any] = {}
        if options.get("save") or options.get("load"):
            self.models["actor"] = Actor(self.config, self.mesh, family, self.hf)
        self.critic = self.models["critic"] = Critic(self.config, self.mesh, family, self.hf)
        self.budget = options.get("budget", 64)

    def load_hf(self, model: str) -> None:
        """The checkpoint's trunk under a head of known weights: one of zeros would hand the trunk no gradient."""
        for one in self.models.values():
            one.load_hf(model)
        if hasattr(self.critic.chunks[-1], "value_head"):
            weight = self.critic.chunks[-1].value_head.weight
            with torch.no_grad():
                weight.copy_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
        self.critic.optimizer.reload_model_params()

    def feed(self) -> Any:
        """This rank's micro-batches, with the values of the current critic in them."""
        import dataclasses

        from megatron_rl.actor import feed
        from megatron_rl.actor.collect import to_leader

        whole = targets(make_batch(self.hf["vocab_size"], self.critic.moe_layers, self.critic.experts, self.hf["num_experts_per_tok"]))
        mine = whole.select(range(self.mesh.data_rank, len(whole.trajectories), self.mesh.data_size)) if self.mesh.is_leader else None

        def hand_out(batch: Any) -> Any:
            multiple = self.critic.micro_batch_multiple
            experts = self.critic.experts
            return feed.hand_out(
                self.mesh, self.critic.places, batch, budget=self.budget, experts=experts, max_tokens=32, multiple=multiple
            )

        first = hand_out(mine)
        values = to_leader(self.mesh, first.micro_batches, self.critic.values(first.micro_batches) or [], mine)
        filled = None if mine is None else dataclasses.replace(mine, values=tuple(np.nan_to_num(v) for v in values))
        everyone = self.mesh.gather(
            {str(i * self.mesh.data_size + self.mesh.data_rank): v[~np.isnan(v)].tolist() for i, v in enumerate(values)}
        )
        self.values = {k: v for part in everyone for k, v in part.items()}
        return hand_out(filled)

    def update(self, batch: Any) -> dict[str, float]:
        """One step; its reduced metrics."""
        from megatron_rl.actor import metrics
        from megatron_rl.methods.objective import Denominators

        count = sum(int((b.mask_T & ~b.returns_T.isnan()).sum()) for b in batch.micro_batches)
        total = sum(self.mesh.gather(count if self.mesh.reports else 0))
        done = self.critic.update(batch.micro_batches, Denominators(total, batch.over.sequences, 32), LR)
        return metrics.reduce(self.mesh, done.metrics) | {"grad_norm": done.grad_norm, "targets": total}


def run(model: str, checkpoints: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Values, two updates, values again; in between a checkpoint is written or read."""
    from megatron_rl.actor.checkpoint import TrainState, load, save

    case = Case(model, options)
    found: dict[str, Any] = {"steps": []}
    architecture = case.hf["architectures"][0]
    if options.get("load"):
        load(checkpoints / options["load"] / "step_000001", case.models, architecture)
    else:
        case.load_hf(model)
        batch = case.feed()
        found["values"] = case.values
        found["steps"].append(case.update(batch))
        if options.get("head"):
            found["head_gradient_error"] = head_gradient_error(case, batch)
    if options.get("save"):
        state = TrainState(1, 1, 1, 0, architecture, case.mesh.world_size, True)
        save(checkpoints / options["save"], case.models, state, keep=1)
        if options["save"] == "one":
            save(checkpoints / "alone", {"actor": case.models["actor"]}, state, keep=1)
    batch = case.feed()
    found["values_between"] = case.values
    found["steps"].append(case.update(batch))
    # Towards the same targets again, from values that are one step old: the clip acts.
    found["steps"].append(case.update(batch))
    case.feed()
    found["values_after"] = case.values
    if options.get("load"):
        found["refusal"] = refusal(case, checkpoints, architecture)
    case.mesh.barrier()
    return found


def head_gradient_error(case: Case, batch: Any) -> float:
    """How far the head's gradient in Megatron's buffer is from autograd's of the written loss, relative to its norm.

    The written loss: mean over targets of (w . h - G)^2 / 2, with h as the trunk gives it. An update at rate 0 and without
    clipping leaves the gradient in the buffer; data parallelism would leave only a shard of it.
    """
    from megatron_rl.methods.objective import Denominators

    hidden, _ = case.critic.score_each(batch.micro_batches, "live", lambda i, b, h: h)
    weight = case.critic.chunks[-1].value_head.weight.detach().clone().requires_grad_()
    total, loss = 0, torch.zeros(())
    for b, h in zip(batch.micro_batches, hidden, strict=True):
        on = b.mask_T & ~b.returns_T.isnan()
        old_T, value_T = b.values_T[on], (h.float() @ weight[0])[on]
        near_T = torch.minimum(torch.maximum(value_T, old_T - 0.01), old_T + 0.01)
        loss = loss + torch.maximum((value_T - b.returns_T[on]).square(), (near_T - b.returns_T[on]).square()).sum() / 2
        total += int(on.sum())
    (loss / total).backward()
    case.critic.update(batch.micro_batches, Denominators(total, batch.over.sequences, 32), 0.0)
    found = case.critic.chunks[-1].value_head.weight.main_grad
    return float((found - weight.grad).norm() / weight.grad.norm())


def refusal(case: Case, checkpoints: Path, architecture: str) -> str:
    """What is said of a checkpoint that was written without a critic."""
    from megatron_rl.actor.checkpoint import load

    try:
        load(checkpoints / "alone/step_000001", case.models, architecture)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    model, checkpoints, out, runs = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    faulthandler.dump_traceback_later(200, exit=True)  # a hang shows where
    prepare_process(threads=1)
    results = {name: run(model, checkpoints, options) for name, options in runs.items()}
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(results))
    destroy_mesh()


if __name__ == "__main__":
    main()
