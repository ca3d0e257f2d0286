"""Building a stack from a configuration, and the errors that name field, value and remedy."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import megatron_rl.methods
from megatron_rl.config import MethodConfig, ObjectiveConfig
from megatron_rl.fields import field_docs
from megatron_rl.methods import describe, registry
from megatron_rl.methods.catalog import METHODS

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
def test_every_method_documents_itself(method: registry.Method) -> None:
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
    assert registry.Part(method, config).needs <= {"old", "turns", "top_k", "uniform", "router_shift", "reference"}


@pytest.mark.parametrize("name", ["sspo", "pnpo", "epic", "nfpo", "drpo", "sorl", "kpop"])
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
        (("dppo", {"anchor": "theta/old"}), {"old"}),
        (("dppo", {"divergence": "top_k_tv"}), {"top_k"}),
        (("cispo", {"anchor": "theta/mu"}), set()),
        (("sorl", {}), {"old", "turns"}),
        (("sis", {}), {"old", "top_k", "uniform"}),
        (("rspo", {}), {"old", "router_shift"}),
        (("policy_gradient", {}, [("tis", {"level": "turn"})]), {"old", "turns"}),
        (("policy_gradient", {}, [("trm", {})]), set()),
        (("policy_gradient", {}, [("kl_penalty", {})]), {"reference"}),
    ],
)
def test_needs_follow_the_switches(case: Any, needs: set[str]) -> None:
    assert stack(*case).needs == needs


def test_a_stack_that_the_run_cannot_feed_is_refused() -> None:
    built = stack("ppo", {}, [("trm", {"source": "top_k"})])
    built.check_available({"old", "top_k"})
    with pytest.raises(ValueError, match="corrections: 'trm' needs the top-K log-probs"):
        built.check_available({"old"})
    with pytest.raises(ValueError, match="objective: 'sorl' needs the turn index"):
        stack("sorl").check_available({"old"})


def test_aggregation_is_the_papers_unless_overridden() -> None:
    assert stack("dppo").aggregation == "seq-mean-token-sum-norm"
    assert stack("dppo", aggregation="token-mean").aggregation == "token-mean"


def test_statistics_are_asked_for_only_where_needed() -> None:
    assert not stack("ppo", {}, [("tis", {})]).has_statistics
    assert stack("ppo", {}, [("snis", {})]).has_statistics
    assert stack("acpo_adaptive").has_statistics
    assert stack("sorl").has_clipped_loss
    assert not stack("ppo").has_clipped_loss
