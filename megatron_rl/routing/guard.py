"""Which of Megatron's router settings replay can stand, and by name which it cannot. Checked when routers are bound, before any forward.

Supported: softmax before or after the top-k, sigmoid scores, an expert bias that stays as it was loaded, groups of experts, gates scaled
by a constant, dense layers among the MoE layers, shared experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """One field of Megatron's TransformerConfig."""

    field: str
    fits: Callable[[Any], bool]
    why: str
    remedy: str


def _absent(value: Any) -> bool:
    return not value


RULES = (
    Rule("moe_expert_capacity_factor", lambda value: value is None, "tokens over an expert's capacity would lose given experts", "None"),
    Rule("moe_expert_rank_capacity_factor", lambda value: value is None, "tokens over a rank's capacity would lose given experts", "None"),
    Rule("moe_pad_expert_input_to_capacity", _absent, "it goes with a capacity, beyond which tokens lose given experts", "False"),
    Rule(
        "moe_router_load_balancing_type",
        lambda value: value in ("none", ["none"]),
        "auxiliary losses count the router's own choice instead of the given one, and other kinds of balancing choose by themselves",
        '"none"',
    ),
    Rule("moe_z_loss_coeff", lambda value: value is None, "its gradient is scaled by token counts that the loss here does not use", "None"),
    Rule("moe_router_fusion", _absent, "the fused router asks nobody which experts to take", "False"),
    Rule("moe_input_jitter_eps", lambda value: value is None, "noise would give a recomputation other scores than the forward", "None"),
    Rule("moe_router_force_load_balancing", _absent, "random logits stand in for the router's", "False"),
    Rule("moe_router_force_biased", lambda value: value is None, "made-up logits stand in for the router's", "None"),
    Rule("moe_enable_routing_replay", _absent, "Megatron's own replay takes the place that replay here needs", "False"),
    Rule("mtp_num_layers", _absent, "routers of multi-token prediction have no routes, and the layer numbers of others", "None"),
    Rule(
        "moe_router_score_function",
        lambda value: value in ("softmax", "sigmoid"),
        "it was never compared with an engine",
        "softmax or sigmoid",
    ),
)


def check_router_settings(config: Any) -> None:
    """Raises ValueError, naming the field, its value and the remedy, if routers with this configuration cannot be replayed.

    A field that a version of Megatron does not have is as if it were off.
    """
    for rule in RULES:
        if hasattr(config, rule.field) and not rule.fits(getattr(config, rule.field)):
            raise ValueError(
                f"{rule.field}: {getattr(config, rule.field)!r} does not go with routing replay: {rule.why}; set it to {rule.remedy}"
            )
    rate = getattr(config, "moe_router_bias_update_rate", 0.0)
    if getattr(config, "moe_router_enable_expert_bias", False) and rate:
        raise ValueError(
            f"moe_router_bias_update_rate: {rate!r} does not go with routing replay: the bias would follow the given loads, padding's "
            "among them, away from the engine's; set it to 0"
        )
