"""The list of methods: one line a file."""

from __future__ import annotations

from importlib import import_module

from .objective import Method

NAMES = (
    "acpo_adaptive",
    "acpo_advantage",
    "cispo",
    "cppo",
    "ctpo",
    "dapo_dynamic",
    "direct_advantage",
    "dppo",
    "dr_grpo",
    "drpo",
    "dvp",
    "dynamic_sampling",
    "epic",
    "gae",
    "geo_rs",
    "gmpo",
    "group",
    "grpo",
    "gspo",
    "gspo_token",
    "icepop",
    "keep_sets",
    "kl_in_reward",
    "kl_penalty",
    "kpop",
    "length_lr",
    "m2po",
    "minirl",
    "minpro",
    "mipu",
    "mis",
    "mis_po",
    "nfpo",
    "nll",
    "opsm",
    "overlong",
    "pnpo",
    "policy_gradient",
    "popo",
    "ppo",
    "rspo",
    "sapo",
    "sis",
    "snis",
    "sorl",
    "sspo",
    "step_advantage",
    "tis",
    "trm",
    "vcpo",
    "vespo",
    "veto",
)
"""Each the name of a file of this package, of the `Method` in it, and of the method in a configuration."""

METHODS: dict[str, Method] = {name: import_module(f".{name}", __package__).METHOD for name in NAMES}
