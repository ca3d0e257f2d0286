"""Replay under Megatron's own router function in every form that families use, and the settings that replay refuses by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_rl.actor  # noqa: F401  applies the CPU patches before Megatron is imported
from megatron_rl.actor.model import choose_implementation, transformer_config
from megatron_rl.config import Config, ModelConfig
from megatron_rl.convert.families import family_for
from megatron_rl.routing.guard import RULES, check_router_settings
from megatron_rl.routing.replay import RoutingReplay
from tests.unit.test_convert_families import DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS, OLMOE, QWEN3_30B_A3B, moonlight

EXPERTS, ROWS = 8, 40
FORMS: dict[str, dict[str, Any]] = {
    "softmax over the chosen": {"topk": 2},
    "softmax before the choice": {"topk": 2, "use_pre_softmax": True},
    "one expert, softmax before": {"topk": 1, "use_pre_softmax": True},
    "groups, scaled": {"topk": 3, "use_pre_softmax": True, "num_groups": 4, "group_topk": 2, "scaling_factor": 1.5},
    "sigmoid": {"topk": 3, "score_function": "sigmoid"},
    "sigmoid, bias, groups, scaled": {
        "topk": 4,
        "score_function": "sigmoid",
        "bias": True,
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 2.5,
    },
}
"""Qwen3 and Mixtral, Qwen2-MoE and OLMoE, the corner of one expert, DeepSeek-V2, a sigmoid alone, DeepSeek-V3."""


class Router(nn.Module):
    """Megatron's TopKRouter without its process groups: the same function with the same hook."""

    def __init__(self, form: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = {k: v for k, v in form.items() if k != "bias"}
        generator = torch.Generator().manual_seed(3)
        self.expert_bias = torch.randn(EXPERTS, generator=generator) if "bias" in form else None
        self.layer_number = 1
        self.router_replay: Any = None
        self.config = SimpleNamespace(
            moe_router_score_function=form.get("score_function", "softmax"), moe_router_pre_softmax=form.get("use_pre_softmax", False)
        )

    def forward(self, logits_RE: Tensor) -> tuple[Tensor, Tensor]:
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        return topk_routing_with_score_function(logits_RE, expert_bias=self.expert_bias, router_replay=self.router_replay, **self.arguments)


def scores(form: dict[str, Any], logits_RE: Tensor) -> Tensor:
    """What gates are made of, from the published formulas."""
    if form.get("score_function") == "sigmoid":
        return logits_RE.sigmoid()
    return logits_RE.softmax(-1)


def masked_gates(form: dict[str, Any], logits_RE: Tensor, map_RE: Tensor) -> Tensor:
    """[R, E] the gate over given experts: scores outside are 0; normalised unless the softmax came before the choice."""
    kept = torch.where(map_RE, scores(form, logits_RE), 0.0)
    normalised = kept if form.get("use_pre_softmax") or form["topk"] == 1 else kept / kept.sum(-1, keepdim=True)
    return normalised * form.get("scaling_factor", 1.0)


def replayed(form: dict[str, Any], logits_RE: Tensor, rows_RK: Tensor) -> tuple[Tensor, Tensor]:
    router = Router(form)
    replay = RoutingReplay([router], Router)
    with replay.session("replay", [rows_RK[:, None]], micro_batches=1):
        replay.start_micro_batch(0, 0)
        return router(logits_RE)


def own_routes(form: dict[str, Any], logits_RE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gates, map, routes [R, K], log-scores of them) of the router by itself."""
    router = Router(form)
    gates, chosen = router(logits_RE)  # bound to nothing
    replay = RoutingReplay([router], Router)
    with replay.session("record", micro_batches=1, keep_scores=True) as session:
        replay.start_micro_batch(0, 0)
        recorded_gates, recorded_map = router(logits_RE)
    assert torch.equal(gates, recorded_gates) and torch.equal(chosen, recorded_map)
    return gates, chosen, session.recorded[0, 1], session.scores[0, 1]


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_replay_of_own_routes_is_bit_identical(form: dict[str, Any], logits: Tensor) -> None:
    gates, chosen, rows, _ = own_routes(form, logits)
    again, map_again = replayed(form, logits, rows)
    assert torch.equal(gates, again)
    assert torch.equal(chosen, map_again)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_other_routes_are_taken_and_gates_and_gradients_are_the_masked_gates(form: dict[str, Any], logits: Tensor) -> None:
    """Random routes obey neither groups nor bias; they are an engine's, whose word counts."""
    rows = torch.rand(ROWS, EXPERTS, generator=torch.Generator().manual_seed(2)).argsort(-1)[:, : form["topk"]]
    gates, chosen = replayed(form, logits, rows)
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, rows, True))
    assert not torch.equal(chosen, own_routes(form, logits)[1])
    weights = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(4))
    wanted = masked_gates(form, logits, chosen)
    torch.testing.assert_close(gates, wanted)
    (found_gradient,) = torch.autograd.grad((gates * weights).sum(), logits)
    (wanted_gradient,) = torch.autograd.grad((wanted * weights).sum(), logits)
    torch.testing.assert_close(found_gradient, wanted_gradient)
    assert found_gradient.abs().sum() > 0


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_log_scores_are_those_of_the_normalised_scores_without_the_bias(form: dict[str, Any], logits: Tensor) -> None:
    _, _, rows, log_scores = own_routes(form, logits)
    plain = scores(form, logits)
    torch.testing.assert_close(log_scores, (plain / plain.sum(-1, keepdim=True)).log().gather(1, rows))


MODELS = {
    "qwen3": QWEN3_30B_A3B,
    "olmoe": OLMOE,
    "gpt-oss": GPT_OSS,
    "deepseek-v2": DEEPSEEK_V2 | {"num_experts_per_tok": 6},
    "deepseek-v3": DEEPSEEK_V3,
    "moonlight": moonlight(),
}


def built(hf: dict[str, Any]) -> Any:
    """Megatron's configuration as training builds it."""
    how = choose_implementation(cuda=False, transformer_engine=False, apex=False)
    return transformer_config(Config(model=ModelConfig(path="x", dtype="float32")), family_for(hf), hf, how, cuda=False)


@pytest.mark.parametrize("hf", MODELS.values(), ids=MODELS)
def test_every_family_as_it_is_built_can_be_replayed(hf: dict[str, Any]) -> None:
    check_router_settings(built(hf))


REFUSED = {
    "moe_expert_capacity_factor": 1.25,
    "moe_expert_rank_capacity_factor": 1.25,
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_z_loss_coeff": 1e-3,
    "moe_router_fusion": True,
    "moe_input_jitter_eps": 0.01,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": 1.0,
    "moe_enable_routing_replay": True,
    "mtp_num_layers": 1,
    "moe_router_score_function": "sqrtsoftplus",
}


@pytest.mark.parametrize(("name", "value"), REFUSED.items())
def test_what_replay_cannot_stand_is_refused_by_name(name: str, value: Any) -> None:
    config = built(QWEN3_30B_A3B)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=rf"^{name}: {value!r} does not go with routing replay: .+; set it to "):
        check_router_settings(config)


@pytest.mark.parametrize("kind", ["sinkhorn", "seq_aux_loss", "global_aux_loss", "quantile_balancing", ["aux_loss", "none"]])
def test_every_kind_of_balancing_but_none_is_refused(kind: Any) -> None:
    config = built(QWEN3_30B_A3B)
    config.moe_router_load_balancing_type = kind
    with pytest.raises(ValueError, match="moe_router_load_balancing_type"):
        check_router_settings(config)


def test_a_bias_that_moves_is_refused_and_one_that_stays_is_not() -> None:
    config = built(DEEPSEEK_V3)
    assert config.moe_router_enable_expert_bias
    config.moe_router_bias_update_rate = 1e-3
    with pytest.raises(ValueError, match=r"moe_router_bias_update_rate: 0.001 does not go with .*; set it to 0"):
        check_router_settings(config)


def test_all_rules_are_tried_and_checked_where_routers_are_bound() -> None:
    assert {rule.field for rule in RULES} == set(REFUSED)
    router = Router(FORMS["sigmoid"])
    router.config.moe_expert_capacity_factor = 1.0
    with pytest.raises(ValueError, match="moe_expert_capacity_factor"):
        RoutingReplay([router], Router)
