"""Stacks that contradict their run are refused before anything starts, with the field, the value and what to do about it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl import cli
from megatron_rl.config import (
    AdvantageConfig,
    Config,
    CriticConfig,
    DataConfig,
    MethodConfig,
    ModelFacts,
    ObjectiveConfig,
    ReferenceConfig,
    RolloutConfig,
    TrainConfig,
)
from megatron_rl.methods.requirements import EXACT_VOCABULARY, configured, wants_critic

ROOT = Path(__file__).resolve().parents[2]
MOE = ModelFacts("Qwen3MoeForCausalLM", layers=4, heads=4, kv_heads=2, experts=8, vocab_size=512, max_positions=4096)
DENSE = dataclasses.replace(MOE, experts=0)
BYPASS = {"train": TrainConfig(old_policy="behaviour")}
RECOMPUTED = "needs the trainer's own log-probs at the start of the step: set train.old_policy to recomputed"
STEPS = {"data": DataConfig(step_delimiter="=")}
PRUNED = RolloutConfig(min_p=1e-3, keep_sets=64)


def one(name: str, **params: Any) -> tuple[MethodConfig, ...]:
    return (MethodConfig(name, params),)


def refusal(facts: ModelFacts = MOE, **fields: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        configured(Config(**fields), facts)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("dppo", {"anchor": "theta/old"}),
        ("cppo", {"anchor": "theta/old"}),
        ("nfpo", {"anchor": "theta/old"}),
        ("policy_gradient", {"weight": "theta/old"}),
        ("minirl", {}),
        ("sis", {}),
    ],
)
def test_an_objective_anchored_at_old_needs_an_old_forward(name: str, params: dict[str, Any]) -> None:
    objective = ObjectiveConfig(name, params)
    assert refusal(objective=objective, **BYPASS).startswith(f"objective: {name!r} needs ")
    assert "set train.old_policy to recomputed" in refusal(objective=objective, **BYPASS)
    configured(Config(objective=objective), MOE)


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "geo_rs", "veto", "snis", "kpop"])
def test_a_correction_between_old_and_mu_has_nothing_to_correct_in_bypass(name: str) -> None:
    corrections = one(name, pair="old/mu")
    assert refusal(corrections=corrections, **BYPASS).startswith(f"corrections: {name!r} {RECOMPUTED}, or anchor it at mu")
    configured(Config(corrections=corrections), MOE)


@pytest.mark.parametrize("name", ["tis", "mis", "icepop", "geo_rs", "veto", "snis", "kpop", "trm", "m2po", "mis_po", "opsm"])
def test_anchored_at_mu_they_stand_without_one(name: str) -> None:
    configured(Config(corrections=one(name, pair="theta/mu"), **BYPASS), MOE)


@pytest.mark.parametrize("name", ["popo", "mipu", "vcpo"])
def test_methods_around_the_loss_need_it_too(name: str) -> None:
    assert refusal(methods=one(name), **BYPASS).startswith(f"methods: {name!r} {RECOMPUTED}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": ObjectiveConfig("sorl")}, "objective: 'sorl' needs the turn of every token: set data.step_delimiter"),
        ({"objective": ObjectiveConfig("direct_advantage")}, "objective: 'direct_advantage' needs the turn of every token: set data.step"),
        ({"advantage": AdvantageConfig("step_advantage")}, "advantage.name: 'step_advantage' needs steps: set data.step_delimiter"),
        ({"corrections": one("tis", level="turn")}, "corrections: 'tis' needs the turn of every token: set data.step_delimiter"),
    ],
)
def test_steps_need_a_text_that_ends_them(fields: dict[str, Any], message: str) -> None:
    """Without one an answer is one turn, and the method would silently be another."""
    assert refusal(**fields).startswith(message)
    configured(Config(**fields, **STEPS), MOE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"corrections": one("kl_penalty")}, "corrections: 'kl_penalty' needs a frozen reference policy: set reference.path"),
        ({"methods": one("kl_in_reward")}, "methods: 'kl_in_reward' needs a frozen reference policy: set reference.path"),
    ],
)
def test_a_reference_must_be_named(fields: dict[str, Any], message: str) -> None:
    assert refusal(**fields) == message
    configured(Config(**fields, reference=ReferenceConfig("somewhere")), MOE)


def test_a_penalty_towards_mu_needs_none() -> None:
    configured(Config(corrections=one("kl_penalty", base="mu"), **BYPASS), MOE)


def test_router_shift_needs_routers_and_an_old_forward() -> None:
    rspo = ObjectiveConfig("rspo")
    message = "objective: 'rspo' needs the router's scores: only mixture-of-experts models have them, and train.old_policy must be rec"
    assert refusal(DENSE, objective=rspo).startswith(message)
    assert refusal(objective=rspo, **BYPASS).startswith(message)
    configured(Config(objective=rspo), MOE)


@pytest.mark.parametrize("methods", [(), one("dvp", support="unpruned"), one("popo")])
def test_truncated_sampling_needs_a_trainer_that_truncates(methods: tuple[MethodConfig, ...]) -> None:
    rollout = RolloutConfig(top_p=0.9, keep_sets=64)
    assert refusal(rollout=rollout, methods=methods) == (
        "rollout.top_p, top_k, min_p: (0.9, -1, 0.0) truncate what is sampled, but the trainer normalises over the whole vocabulary; "
        "add methods: [{name: keep_sets}]"
    )
    configured(Config(rollout=rollout, methods=one("keep_sets")), MOE)
    configured(Config(rollout=rollout, methods=one("dvp", support="keep_sets")), MOE)


@pytest.mark.parametrize("methods", [one("keep_sets"), one("dvp", support="keep_sets")])
def test_keep_sets_need_a_sampler_that_truncates(methods: tuple[MethodConfig, ...]) -> None:
    remedy = "needs a sampler that truncates: set rollout.top_p, top_k or min_p, and rollout.keep_sets to the most tokens they leave"
    assert refusal(methods=methods) == f"methods: {methods[0].name!r} {remedy}"


def test_both_engines_prune_alike_or_not_at_all() -> None:
    dvp = one("dvp", support="engine", rho=1e-3)
    assert refusal(methods=dvp).startswith("methods: 'dvp' needs an engine that prunes alike: set rollout.min_p to the method's rho")
    for other in ({"min_p": 1e-2}, {"min_p": 1e-3, "top_p": 0.9}, {"min_p": 1e-3, "top_k": 20}):
        rollout = RolloutConfig(keep_sets=64, **other)
        message = f"rollout.min_p: {rollout.min_p} must equal dvp's rho = 0.001, with top_p 1 and top_k -1"
        assert refusal(methods=dvp, rollout=rollout).startswith(message)
    configured(Config(methods=dvp, rollout=PRUNED), MOE)


@pytest.mark.parametrize(
    ("objective", "unit", "reach", "remedy"),
    [
        ("gspo", "sequence", "token", "sequence"),
        ("gspo", "sequence", "suffix", "sequence"),
        ("minpro", "prefix", "token", "suffix or sequence"),
    ],
)
def test_pruning_by_the_trainer_alone_reaches_as_far_as_the_ratio(objective: str, unit: str, reach: str, remedy: str) -> None:
    def fields(reach: str) -> dict[str, Any]:
        return {"objective": ObjectiveConfig(objective), "methods": one("dvp", support="unpruned", reach=reach)}

    message = f"methods: dvp's reach {reach!r} leaves tokens whose weight is 0, because the ratio of {objective} is per {unit}; "
    assert refusal(**fields(reach)) == f"{message}set it to {remedy}"
    configured(Config(**fields("sequence")), MOE)


def test_one_restriction_of_the_vocabulary() -> None:
    methods = one("dvp", support="keep_sets") + one("keep_sets")
    assert refusal(methods=methods, rollout=PRUNED) == "methods: dvp and keep_sets both restrict the vocabulary; keep one"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"corrections": one("dvp")},
            "corrections[0].name: 'dvp' is not a known correction or penalty (dvp is a vocabulary): name it under methods; choose",
        ),
        ({"methods": one("tis")}, "(tis is a correction): name it under corrections; choose one of: dvp, "),
        ({"methods": one("gae")}, "(gae is a advantage): name it under advantage.name; choose one of: "),
        ({"corrections": one("grpo")}, "(grpo is a objective): name it under objective.name; choose one of: "),
        ({"advantage": AdvantageConfig("dapo")}, "advantage.name: 'dapo' is not a known advantage; choose one of: gae, group, step_ad"),
        ({"methods": one("popo") + one("popo")}, "methods[1].name: 'popo' is stacked twice; its effect would be applied twice. Remove one"),
        ({"methods": one("mipu", prompt=8)}, "methods[0].params.prompt: mipu has no such parameter; it has: tolerance_start, "),
    ],
)
def test_names_belong_to_a_field(fields: dict[str, Any], message: str) -> None:
    assert message in refusal(**fields)


def test_the_exact_divergence_is_for_small_vocabularies() -> None:
    large = dataclasses.replace(MOE, vocab_size=151936)
    exact = one("trm", source="exact")
    assert refusal(large, corrections=exact) == (
        "corrections: 'trm' with source exact asks for all 151936 log-probs of every token, and 16384 is the most that can be carried; set "
        "source to top_k, a lower bound, or sampled"
    )
    configured(Config(corrections=exact), dataclasses.replace(MOE, vocab_size=EXACT_VOCABULARY))
    configured(Config(corrections=one("trm", source="top_k")), large)


def test_one_answer_a_prompt_has_nothing_to_be_compared_with() -> None:
    alone = RolloutConfig(samples_per_prompt=1)
    message = "rollout.samples_per_prompt: 1 leaves 'group' nothing to compare an answer with: every advantage would be 0; raise it, or "
    assert refusal(rollout=alone).startswith(message)
    gae = AdvantageConfig("gae")
    assert "1 leaves 'popo' nothing" in refusal(rollout=alone, advantage=gae, methods=one("popo"))
    assert "1 leaves 'dynamic_sampling' nothing" in refusal(rollout=alone, advantage=gae, methods=one("dynamic_sampling"))
    configured(Config(rollout=alone, advantage=gae), MOE)


def test_every_mini_batch_gets_an_answer() -> None:
    rollout = RolloutConfig(prompts_per_step=2, samples_per_prompt=2)
    train = TrainConfig(mini_batches=5)
    assert refusal(rollout=rollout, train=train) == "train.mini_batches: 5 is more than the 4 answers of a step; lower it"
    configured(Config(rollout=rollout, train=TrainConfig(mini_batches=4)), MOE)


def test_the_overlong_buffer_fits_into_an_answer() -> None:
    message = "methods: overlong's buffer = 33 exceeds rollout.max_new_tokens = 32; DAPO's is a fifth of it"
    assert refusal(methods=one("overlong", buffer=33)) == message
    configured(Config(methods=one("overlong", buffer=33, max_length=64)), MOE)
    configured(Config(methods=one("overlong", buffer=32)), MOE)


@pytest.mark.parametrize("changing", ["overlong", "kl_in_reward"])
def test_changed_rewards_reach_whom_they_should(changing: str) -> None:
    params = {"buffer": 8} if changing == "overlong" else {}
    fields = {"methods": one(changing, **params), "reference": ReferenceConfig("somewhere"), **STEPS}
    steps, gae = AdvantageConfig("step_advantage"), AdvantageConfig("gae")
    assert refusal(advantage=steps, **fields).startswith(f"methods: {changing!r} changes the rewards of whole answers, but step_advantage ")
    bce = CriticConfig(loss="bce")
    assert refusal(advantage=gae, critic=bce, **fields) == (
        f"critic.loss: 'bce' learns probabilities, but {changing!r} makes rewards negative; set it to square, or remove {changing!r}"
    )
    configured(Config(advantage=gae, **fields), MOE)
    configured(Config(advantage=gae, critic=bce), MOE)
    configured(Config(critic=bce, **fields), MOE)  # group advantages have no critic that would mind


@pytest.mark.parametrize("name", ["gae", "step_advantage"])
def test_only_groups_can_leave_truncated_answers_out(name: str) -> None:
    message = f"advantage.reject_truncated: {name} has no group statistics that a truncated answer could leave; set it to false, or "
    assert refusal(advantage=AdvantageConfig(name, reject_truncated=True), **STEPS).startswith(message)
    configured(Config(advantage=AdvantageConfig(reject_truncated=True)), MOE)


def test_a_critics_settings_need_a_critic_and_a_policy_that_learns() -> None:
    message = "critic.warmup_steps: 3 needs a critic, and advantage.name = 'group' has none; remove it, or take gae or "
    assert refusal(critic=CriticConfig(warmup_steps=3)).startswith(message)
    gae, steps = AdvantageConfig("gae"), AdvantageConfig("step_advantage")
    assert refusal(critic=CriticConfig(path="x"), advantage=steps, **STEPS).startswith("critic.path: 'x' needs a critic, and")
    message = "critic.warmup_steps: 3 leaves the policy none of train.steps = 3; lower it or raise those"
    assert refusal(critic=CriticConfig(warmup_steps=3), advantage=gae, train=TrainConfig(steps=3)) == message
    configured(Config(critic=CriticConfig(warmup_steps=3), advantage=gae, train=TrainConfig(steps=4)), MOE)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (AdvantageConfig(), False),
        (AdvantageConfig("gae"), True),
        (AdvantageConfig("step_advantage"), False),
        (AdvantageConfig("step_advantage", {"critic": "learned"}), True),
    ],
)
def test_who_learns_values(advantage: AdvantageConfig, expected: bool) -> None:
    assert wants_critic(configured(Config(advantage=advantage, **STEPS), MOE)[1]) is expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--objective.name", "minirl", "--train.old_policy", "behaviour"], f"objective: 'minirl' {RECOMPUTED}, or anchor it at mu"),
        (["--corrections", "[dvp]"], "corrections: 'dvp' is no entry; write {name: dvp}"),
        (["--corrections", "[{name: dvp}]"], "corrections[0].name: 'dvp' is not a known correction or penalty (dvp is a vocabulary): name"),
        (["--rollout.top_p", "0.9"], "rollout.keep_sets: 0 must be positive: top_p 0.9, top_k -1, min_p 0.0 truncate the sampling dist"),
        (["--rollout.keep_sets", "8"], "rollout.keep_sets: 8 has no use: top_p, top_k and min_p leave everything"),
        (
            ["--rollout.top_p", "0.9", "--rollout.keep_sets", "64"],
            "rollout.top_p, top_k, min_p: (0.9, -1, 0.0) truncate what is sampled, but the trainer normalises over the whole vocabulary;",
        ),
        (
            ["--replay.mode", "R2", "--train.old_policy", "behaviour"],
            "train.old_policy: 'behaviour' leaves R2 without the old-policy forward whose routes it replays; set it to recomputed, or",
        ),
        (["--methods", "[{name: kl_in_reward}]"], "methods: 'kl_in_reward' needs a frozen reference policy: set reference.path"),
        (["--advantage.name", "step_advantage"], "advantage.name: 'step_advantage' needs steps: set data.step_delimiter to the text that"),
        (["--corrections", "[{name: trm, params: {source: exact}}]"], "corrections: 'trm' with source exact asks for all 151936 log-probs"),
    ],
)
def test_the_command_line_says_it_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config.json").write_text((ROOT / "examples/configs/qwen3_30b_a3b.json").read_text())
    assert cli.main(["train", "--model.path", str(tmp_path), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"megatron-rl: error: {message}")
    assert captured.err.count("\n") == 1


def test_sft_has_no_policy_that_sampled(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    arguments = ["sft", "--model.path", str(tmp_path), "--data.path", str(data), "--data.source", "jsonl", "--objective.name", "nll"]
    for field, listed in (("corrections", "[{name: tis}]"), ("methods", "[{name: mipu}]")):
        assert cli.main([*arguments, f"--{field}", listed]) == 2
        name = "tis" if field == "corrections" else "mipu"
        message = f"megatron-rl: error: {field}: {name} needs a policy that sampled, and sft has examples; set it to []\n"
        assert capsys.readouterr().err == message
