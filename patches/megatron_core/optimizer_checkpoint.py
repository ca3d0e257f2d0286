"""Saving and loading DistributedOptimizer state where the inner optimizer is torch's AdamW (no Transformer Engine, no Apex)."""

from __future__ import annotations

from typing import Any

import torch

from ..core import Anchor, Patch
from .version import MEGATRON_CORE, TESTED, V0_16, V0_19


def _allocate_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state it has before the first step: step 0, zero moments."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(param, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
            }


def complete_adam_state() -> None:
    """Make `DistributedOptimizer.state_dict`, `_set_main_param_and_optimizer_states` and `load_state_dict` right for torch's AdamW."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state_dict = DistributedOptimizer.state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict

    def state_dict_also_before_step_1(self: Any) -> Any:
        # Upstream asserts that all parameters agree on one step, so no state at all fails.
        if isinstance(self.optimizer, torch.optim.Adam) and not self.optimizer.state:
            _allocate_adam_state(self.optimizer)
        return state_dict(self)

    @torch.no_grad()  # in fp32 the main parameter is a leaf that requires grad, and upstream copies into it
    def set_states_without_step(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        # Checkpoints keep the step in the parameter groups, not per parameter, but upstream looks up every key of the state:
        # offer the step that load_state_dict has set already.
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        set_states(self, model_param, {**{key: state[key] for key in ("step",) if key in state}, **tensors})

    def load_state_dict_with_own_steps(self: Any, loaded: Any) -> None:
        load_state_dict(self, loaded)
        # Upstream gives all parameters one `step` tensor, which AdamW then increments once a parameter.
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].detach().clone()

    DistributedOptimizer.state_dict = state_dict_also_before_step_1
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_without_step
    DistributedOptimizer.load_state_dict = load_state_dict_with_own_steps


OPTIMIZER_CHECKPOINT = Patch(
    name="optimizer-checkpoint",
    dependency=MEGATRON_CORE,
    reason="with torch's AdamW the state cannot be saved before step 1, nor loaded (missing step, in-place copy on a leaf), and a load "
    "shares one step tensor between all parameters, which then counts steps times parameters.",
    upstream="none",
    versions=TESTED,
    removal="upstream tests DistributedOptimizer checkpoints with torch.optim.AdamW",
    anchors=(
        Anchor(
            "optimizer/distrib_optimizer.py",
            r'steps = list\(set\(\[s\["step"\]\.item\(\) for s in inner_state_dict\["state"\]\.values\(\)\]\)\)\s+assert len\(steps\) == 1',
        ),
        Anchor(
            "optimizer/distrib_optimizer.py",
            r"step = torch\.tensor\(steps\[0\], dtype=torch\.float\)\s+for s in state_dict_state\.values\(\):",
        ),
        Anchor("optimizer/distrib_optimizer.py", r'dst_tensors = \{"param": main_param, \*\*optim_state\}', (V0_16,)),
        Anchor("optimizer/distrib_optimizer.py", r"if not isinstance\(tensors\[key\], torch\.Tensor\):", (V0_19,)),
        Anchor("optimizer/distrib_optimizer.py", r"dst_tensors\[key\]\.copy_\(tensors\[key\]\)"),
    ),
    apply=complete_adam_state,
)
