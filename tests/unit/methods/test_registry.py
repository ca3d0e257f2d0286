"""Building a stack from a configuration, and the errors that name field, value and remedy."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import megatron_rl.methods
from megatron_rl.config import MethodConfig, ObjectiveConfig
from megatron_rl.fields import field_docs
from megatron_rl.methods import describe, registry
from megatron_rl.methods.catalog import METHODS
from megatron_rl.methods.objective import WHOLE_VOCABULARY, Method, Need
from megatron_rl.methods.stack import REMEDIES, Part

from .packs import stack


def test_names_are_file_names_and_files_are_small() -> None:
    folder = Path(megatron_rl.methods.__file__).parent if megatron_rl.methods.__file__ else Path(megatron_rl.methods.__path__[0])
    for name in METHODS:
        assert (folder / f"{name}.py").is_file()
    for file in folder.glob("*.py"):
        text = file.read_text()
        assert len(text.splitlines()) <= 200, file.name
        for forbidden in ("torch.distributed", "import megatron.", "from megatron.", "os.environ", "print("):
            assert forbidden not in text, f"{file.name}: methods are pure, but {forbidden} is in it"


@pytest.mark.parametrize("method", METHODS.values(), ids=lambda m: m.name)
def test_every_method_documents_itself(method: Method) -> None:
    assert method.paper
    assert method.summary
    assert len(method.summary) < 100
    assert set(method.evidence) <= set("FCDAIN")
    assert dataclasses.is_dataclass(method.config)
    config = method.config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.anything = 1
    if method.name != "nll":  # maximum likelihood has no entry in papers.md
        assert set(re.findall(r"\[([FCDAIN])\]", describe.formula(method))) >= set(method.evidence)
    for name, doc in field_docs(method.config).items():
        assert len(doc) > 10, f"{name} does not say what it means"
    assert Part(method, config).needs <= set(get_args(Need))
    assert set(REMEDIES) == set(get_args(Need))


@pytest.mark.parametrize("name", ["sspo", "pnpo", "epic", "nfpo", "drpo", "sorl", "kpop", "dvp", "popo", "mipu", "length_lr", "vcpo"])
def test_inferred_methods_say_so(name: str) -> None:
    """What papers.md marks [I] or [N] is never sold as the paper's."""
    module = __import__(f"megatron_rl.methods.{name}", fromlist=["x"])
    assert re.search(r"\[(I|N)\]", module.__doc__)
    if name not in ("sorl",):
        assert set(METHODS[name].evidence) & set("IN")


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("ppo", {"clip_low": 1.5}, ["objective.params.clip_low", "1.5", "[0, 1]"]),
        ("ppo", {"clip_high": -0.1}, ["objective.params.clip_high", "-0.1"]),
        ("ppo", {"dual_clip": 1.1}, ["objective.params.dual_clip", "1.1", "1.2", "null"]),
        ("ppo", {"clip_low": "small"}, ["objective.params.clip_low", "'small'", "a number"]),
        ("ppo", {"clip": 0.2}, ["objective.params.clip", "no such parameter", "clip_low"]),
        ("nll", {"x": 1}, ["objective.params.x", "none"]),
        ("gmpo", {"clip": 0.0}, ["objective.params.clip", "positive"]),
        ("cispo", {"anchor": "mu"}, ["objective.params.anchor", "'mu'", "theta/old"]),
        ("cispo", {"clip_low": 1.0}, ["clip_low", "null"]),
        ("cispo", {"clip_high": -1.0}, ["clip_high"]),
        ("sapo", {"tau_neg": 0.0}, ["tau_neg"]),
        ("sspo", {"gate": "relu"}, ["gate", "'relu'", "arctan"]),
        ("sspo", {"coordinate": "ratio", "tau_pos": 0.5}, ["tau_pos", "at least 1"]),
        ("minirl", {"weight_cap": 0.5}, ["weight_cap", "null"]),
        ("minpro", {"clip_low": 2.0}, ["clip_low"]),
        ("ctpo", {"power": 2.0}, ["power", "0.5"]),
        ("pnpo", {"low": -1.0}, ["low"]),
        ("epic", {"delta": 0.0}, ["delta", "0.05"]),
        ("nfpo", {"steps": 0}, ["steps"]),
        ("nfpo", {"steps": 1.5}, ["steps", "an integer"]),
        ("vespo", {"k_pos": -1.0}, ["k_pos"]),
        ("drpo", {"threshold": -1.0}, ["threshold"]),
        ("dppo", {"divergence": "js"}, ["divergence", "binary_tv"]),
        ("dppo", {"ratio_cap": 0.1}, ["ratio_cap", "null"]),
        ("cppo", {"w_min": 0.0}, ["w_min", "0.8"]),
        ("cppo", {"quantile": 1.0}, ["quantile"]),
        ("acpo_advantage", {"alpha": 0.0}, ["alpha"]),
        ("acpo_adaptive", {"eps_min": 5.0}, ["eps_min", "eps_max"]),
        ("sorl", {"c_min": 0.0}, ["c_min"]),
        ("rspo", {"gamma_min": 0.0}, ["gamma_min"]),
        ("sis", {"candidates": 0}, ["candidates", "10"]),
        ("dppo", {"candidates": 0}, ["candidates", "20"]),
        ("cppo", {"candidates": 0}, ["candidates", "20"]),
        ("nfpo", {"candidates": 0}, ["candidates", "20"]),
        ("direct_advantage", {"beta": 0.0}, ["beta", "positive"]),
        ("direct_advantage", {"base": "theta"}, ["base", "reference"]),
        ("rspo", {"base": "ppo"}, ["base", "gmpo"]),
        ("rspo", {"base_params": {"clip_high": 0.1}}, ["base_params.clip_high", "gmpo"]),
    ],
)
def test_objective_errors(name: str, params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="(?s)" + ".*".join(re.escape(w) for w in words)):
        stack(name, params)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("tis", {"cap": 0.5}, ["corrections.params.cap", "0.5", "at least 1"]),
        ("tis", {"level": "batch"}, ["corrections.params.level", "'batch'", "token"]),
        ("tis", {"pair": "mu/old"}, ["pair", "old/mu"]),
        ("mis", {"low": 1.5}, ["low"]),
        ("icepop", {"high": 0.5}, ["high"]),
        ("veto", {"low": 0.0}, ["low", "1e-4"]),
        ("trm", {"criterion": "median"}, ["criterion", "max"]),
        ("trm", {"source": "top_k", "pair": "old/mu"}, ["source", "theta/mu"]),
        ("trm", {"source": "exact", "pair": "old/mu"}, ["source", "'exact'", "theta/mu"]),
        ("trm", {"candidates": 0}, ["candidates", "20"]),
        ("trm", {"max_threshold": 0.0}, ["max_threshold"]),
        ("m2po", {"tau": 0.0}, ["tau"]),
        ("mis_po", {"geo_high": 0.9}, ["geo_high"]),
        ("kpop", {"upper": 0.0}, ["upper"]),
        ("snis", {"cap": 0.2}, ["cap"]),
        ("kl_penalty", {"beta": -1.0}, ["beta"]),
        ("kl_penalty", {"base": "ref"}, ["base", "reference"]),
    ],
)
def test_correction_errors(name: str, params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="(?s)" + ".*".join(re.escape(w) for w in words)):
        stack("ppo", {}, [(name, params)])


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("dvp", {"rho": 0.0}, ["rho", "0.0", "1e-5"]),
        ("dvp", {"support": "all"}, ["support", "'all'", "unpruned"]),
        ("dvp", {"reach": "prompt"}, ["reach", "suffix"]),
        ("keep_sets", {"rho": 0.1}, ["rho", "no such parameter", "none"]),
        ("popo", {"max_staleness": 0}, ["max_staleness"]),
        ("popo", {"buffer_groups": 0}, ["buffer_groups"]),
        ("dynamic_sampling", {"max_rounds": 1}, ["max_rounds", "at least 2"]),
        ("overlong", {"buffer": 0}, ["buffer"]),
        ("overlong", {"buffer": 100, "max_length": 50}, ["max_length", "50", "buffer = 100"]),
        ("overlong", {"penalty": -1.0}, ["penalty"]),
        ("kl_in_reward", {"beta": -1.0}, ["beta"]),
        ("kl_in_reward", {"estimator": "k4"}, ["estimator", "k3"]),
        ("mipu", {"tolerance_start": -1.0}, ["tolerance_start"]),
        ("mipu", {"tolerance_end": -1.0}, ["tolerance_end"]),
        ("mipu", {"anneal_steps": 0}, ["anneal_steps"]),
        ("mipu", {"prompts": 0}, ["prompts"]),
        ("mipu", {"samples": 0}, ["samples"]),
        ("mipu", {"estimator": "exact"}, ["estimator", "first_order"]),
        ("mipu", {"max_consecutive_rollbacks": 0}, ["max_consecutive_rollbacks"]),
        ("length_lr", {"surge": 1.0}, ["surge"]),
        ("length_lr", {"floor": 0.0}, ["floor"]),
        ("length_lr", {"period": -1.0}, ["period"]),
        ("length_lr", {"baseline_steps": 0}, ["baseline_steps"]),
        ("length_lr", {"cooldown": -1}, ["cooldown"]),
        ("vcpo", {"reference_share": 0.0}, ["reference_share", "null"]),
        ("vcpo", {"floor": 2.0}, ["floor"]),
    ],
)
def test_method_errors(name: str, params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match="(?s)methods.*" + ".*".join(re.escape(w) for w in words)):
        registry.build(ObjectiveConfig("ppo"), [], [MethodConfig(name, params)])


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("group", {"baseline": "median"}, ["advantage.params.baseline", "leave-one-out"]),
        ("group", {"std": "biased"}, ["advantage.params.std", "population"]),
        ("group", {"eps": -1.0}, ["advantage.params.eps"]),
        ("gae", {"gamma": 1.5}, ["advantage.params.gamma", "[0, 1]"]),
        ("gae", {"lam": -0.5}, ["advantage.params.lam"]),
        ("step_advantage", {"completions": 0}, ["advantage.params.completions"]),
        ("step_advantage", {"critic": "oracle"}, ["advantage.params.critic", "monte-carlo"]),
    ],
)
def test_advantage_errors(name: str, params: dict[str, Any], words: list[str]) -> None:
    assert METHODS[name].kind == "advantage"
    with pytest.raises(ValueError, match="(?s)" + ".*".join(re.escape(w) for w in words)):
        METHODS[name].config(**params)


def test_unknown_and_misplaced_names() -> None:
    with pytest.raises(ValueError, match=r"objective\.name: 'acpo' is not a known objective; choose one of: acpo_adaptive, acpo_advantage"):
        registry.build(ObjectiveConfig("acpo"), [])
    with pytest.raises(ValueError, match=r"objective\.name: 'tis' .*\(tis is a correction\)"):
        registry.build(ObjectiveConfig("tis"), [])
    with pytest.raises(ValueError, match=r"corrections\[1\]\.name: 'ppo' .*\(ppo is a objective\)"):
        registry.build(ObjectiveConfig("ppo"), [MethodConfig("tis"), MethodConfig("ppo")])
    with pytest.raises(ValueError, match=r"corrections\[1\]\.name: 'tis' is stacked twice"):
        registry.build(ObjectiveConfig("ppo"), [MethodConfig("tis"), MethodConfig("tis", {"level": "sequence"})])


@pytest.mark.parametrize(
    ("case", "needs"),
    [
        (("ppo", {}), {"old"}),
        (("nll", {}), set()),
        (("dppo", {}), set()),
        (("dppo", {"anchor": "theta/old"}), {"recomputed_old"}),
        (("dppo", {"divergence": "top_k_tv"}), {"behaviour_top_k"}),
        (("cppo", {"divergence": "top_k_kl", "anchor": "theta/old"}), {"recomputed_old", "old_top_k"}),
        (("minirl", {}), {"recomputed_old"}),
        (("cispo", {"anchor": "theta/mu"}), set()),
        (("sorl", {}), {"old", "turns"}),
        (("sis", {}), {"recomputed_old", "old_top_k", "uniform"}),
        (("direct_advantage", {}), {"old", "turns"}),
        (("direct_advantage", {"base": "reference"}), {"reference", "turns"}),
        (("direct_advantage", {"base": "mu"}), {"turns"}),
        (("rspo", {}), {"old", "router_shift"}),
        (("policy_gradient", {}, [("tis", {"level": "turn"})]), {"recomputed_old", "turns"}),
        (("policy_gradient", {}, [("trm", {})]), set()),
        (("policy_gradient", {}, [("trm", {"source": "exact"})]), {"behaviour_top_k"}),
        (("policy_gradient", {}, [("trm", {"source": "top_k", "pair": "theta/old"})]), {"recomputed_old", "old_top_k"}),
        (("policy_gradient", {}, [("trm", {"source": "sampled", "pair": "old/mu"})]), {"recomputed_old"}),
        (("policy_gradient", {}, [("dvp", {})]), {"min_p_sampling"}),
        (("policy_gradient", {}, [("dvp", {"support": "keep_sets"})]), {"keep_sets"}),
        (("policy_gradient", {}, [("dvp", {"support": "unpruned"})]), set()),
        (("policy_gradient", {}, [("keep_sets", {})]), {"keep_sets"}),
        (("policy_gradient", {}, [("kl_penalty", {})]), {"reference"}),
    ],
)
def test_needs_follow_the_switches(case: Any, needs: set[str]) -> None:
    assert stack(*case).needs == needs


def test_a_stack_that_the_run_cannot_feed_is_refused() -> None:
    built = stack("ppo", {}, [("trm", {"source": "top_k"})])
    built.check_available({"old", "behaviour_top_k"})
    with pytest.raises(ValueError, match="corrections: 'trm' needs the engine's likeliest tokens"):
        built.check_available({"old"})
    with pytest.raises(ValueError, match=r"objective: 'sorl' needs the turn of every token: set data\.step_delimiter"):
        stack("sorl").check_available({"old"})
    with pytest.raises(ValueError, match=r"methods: 'dvp' needs .* set rollout\.min_p"):
        stack("ppo", {}, [("dvp", {})]).check_available({"old"})


@pytest.mark.parametrize(
    ("case", "behaviour", "old"),
    [
        (("ppo", {}), 0, 0),
        (("sis", {}), 0, 10),
        (("sis", {"candidates": 50}), 0, 50),
        (("dppo", {}), 0, 0),  # binary divergences look at the label alone
        (("dppo", {"divergence": "top_k_tv"}), 20, 0),
        (("cppo", {"divergence": "top_k_kl", "candidates": 7, "anchor": "theta/old"}), 0, 7),
        (("sis", {}, [("trm", {"source": "top_k"})]), 20, 10),
        (("nfpo", {"divergence": "top_k_kl"}, [("trm", {"source": "top_k", "candidates": 33})]), 33, 0),
        (("ppo", {}, [("trm", {"source": "exact"})]), 99, 0),  # the vocabulary
        (("dppo", {"divergence": "top_k_tv", "candidates": 500}), 99, 0),
    ],
)
def test_candidates_are_the_most_that_any_method_wants(case: Any, behaviour: int, old: int) -> None:
    assert METHODS["trm"].candidates is not None
    assert METHODS["trm"].candidates(METHODS["trm"].config(source="exact")) == WHOLE_VOCABULARY
    built = stack(*case)
    assert (built.candidates("behaviour_top_k", 99), built.candidates("old_top_k", 99)) == (behaviour, old)


def test_aggregation_is_the_papers_unless_overridden() -> None:
    assert stack("dppo").aggregation == "seq-mean-token-sum-norm"
    assert stack("dppo", aggregation="token-mean").aggregation == "token-mean"


def test_statistics_are_asked_for_only_where_needed() -> None:
    assert not stack("ppo", {}, [("tis", {})]).has_statistics
    assert stack("ppo", {}, [("snis", {})]).has_statistics
    assert stack("acpo_adaptive").has_statistics
    assert stack("sorl").has_clipped_loss
    assert not stack("ppo").has_clipped_loss
