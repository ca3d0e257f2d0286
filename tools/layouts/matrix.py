"""Which layouts and which methods are compared, and which pairs of them the quick run takes.

Parameters are chosen so that the branch that makes a method what it is (a clip, a rejection, a pruned token) acts on some of the tiny
model's tokens and not on others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, cycle, islice
from typing import Any, Literal

Recompute = Literal["none", "selective", "full"]
SECONDS_A_CASE = 120
"""A case that takes longer hangs."""
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Layout:
    """So many processes, laid out as the `parallel` section of a configuration says."""

    processes: int
    parallel: dict[str, int] = field(default_factory=dict)

    @property
    def traits(self) -> frozenset[str]:
        """What is split: fields of `parallel`, and "data"."""
        ranks = self.parallel.get("tensor", 1) * self.parallel.get("context", 1) * self.parallel.get("pipeline", 1)
        return frozenset(self.parallel) | ({"data"} if self.processes > ranks else set())


LAYOUTS: dict[str, Layout] = {
    "TP2": Layout(2, {"tensor": 2}),
    "CP2": Layout(2, {"context": 2}),
    "PP2": Layout(2, {"pipeline": 2}),
    "PP2xVPP2": Layout(2, {"pipeline": 2, "virtual_pipeline": 2}),
    "EP2": Layout(2, {"expert": 2}),
    "DP2": Layout(2),
    "TP2xEP2": Layout(2, {"tensor": 2, "expert": 2}),
    "ETP2": Layout(4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    "TP2xCP2xEP2": Layout(4, {"tensor": 2, "context": 2, "expert": 2}),
    "TP2xPP2xEP2": Layout(4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "CP2xDP2": Layout(4, {"context": 2}),
    "CP2xPP2": Layout(4, {"context": 2, "pipeline": 2}),
}


@dataclass(frozen=True)
class Setup:
    """A method as a configuration names it: fields of `Config` with `name` and `params` given shortly."""

    objective: str = "grpo"
    params: dict[str, Any] = field(default_factory=dict)
    corrections: dict[str, dict[str, Any]] = field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = field(default_factory=dict)
    rollout: dict[str, Any] = field(default_factory=dict)


TIS: dict[str, dict[str, Any]] = {"tis": {}}
METHODS: dict[str, Setup] = {
    "grpo": Setup("grpo", {"clip_low": 0.05, "clip_high": 0.05}, corrections=TIS),
    "ppo": Setup("ppo", {"clip_low": 0.05, "clip_high": 0.05}, corrections=TIS),
    "minpro": Setup("minpro"),
    "ctpo": Setup("ctpo", corrections=TIS),
    "cppo": Setup("cppo", {"budget_rule": "quantile", "budget": 2e-3, "threshold": 1e-3}),
    "gspo": Setup("gspo", corrections=TIS),
    "gmpo": Setup("gmpo", {"clip": 0.05}, corrections=TIS),
    "trm": Setup("policy_gradient", corrections={"trm": {"max_threshold": 1.0, "mean_threshold": 0.3}}),
    "sorl": Setup("sorl", {"clip_low": 0.01, "clip_high": 0.01}, corrections=TIS),
    "acpo_adaptive": Setup("acpo_adaptive", {"base": 0.01, "alpha": 1.0}, corrections=TIS),
    "dvp": Setup("ppo", methods={"dvp": {"rho": 0.3}}, rollout={"min_p": 0.3, "keep_sets": 256}),
    "sspo": Setup("sspo", corrections=TIS),
}
"""The matrix that every layout is held to, and grpo."""
SPECIAL: dict[str, Setup] = {
    "sis": Setup("sis", {"candidates": 256, "clip_low": 0.05, "clip_high": 0.05}, corrections=TIS),
    "dppo top_k_tv": Setup("dppo", {"divergence": "top_k_tv", "candidates": 8, "threshold": 1e-3}),
    "cppo top_k_tv old": Setup("cppo", {"divergence": "top_k_tv", "anchor": "theta/old", "candidates": 8, "threshold": 1e-3}),
    "rspo": Setup("rspo", {"gamma_min": 0.9, "base_params": {"clip": 0.05}}),
    "keep_sets": Setup("ppo", methods={"keep_sets": {}}, rollout={"top_k": 8, "keep_sets": 8}),
    "dvp suffix": Setup("minpro", methods={"dvp": {"rho": 0.1, "support": "unpruned", "reach": "suffix"}}),
    "trm exact": Setup("policy_gradient", corrections={"trm": {"source": "exact", "max_threshold": 0.5, "mean_threshold": 0.195}}),
    "kl_penalty": Setup("ppo", corrections={"kl_penalty": {"beta": 0.1}}),
    "direct_advantage": Setup("direct_advantage"),
    "nfpo": Setup("nfpo", {"steps": 4, "threshold": 1e-3}),
}
"""Methods that a forward, the rollout or the context-parallel exchange must serve in a way of their own."""


@dataclass(frozen=True)
class Case:
    """One run of the worker."""

    method: str
    layout: str | None = None
    """A key of `LAYOUTS`; None is one process, the oracle."""
    recompute: Recompute = "none"
    replay: Literal["none", "R2", "R3"] = "R3"
    budget: int = 48
    """Positions of a micro-batch."""

    @property
    def setup(self) -> Setup:
        """The method's configuration."""
        return (METHODS | SPECIAL)[self.method]

    @property
    def where(self) -> Layout:
        """The layout."""
        return LAYOUTS[self.layout] if self.layout else Layout(1)

    @property
    def name(self) -> str:
        """As results are keyed."""
        usual = Case(self.method, self.layout)
        details = [f"{k} {getattr(self, k)}" for k in ("recompute", "replay", "budget") if getattr(self, k) != getattr(usual, k)]
        return ", ".join([f"{self.method} on {self.layout or 'one process'}", *details])


def oracle(method: str) -> Case:
    """One process, all of a mini-batch in one micro-batch, nothing recomputed."""
    return Case(method, budget=96)


def full() -> list[Case]:
    """Every method on every layout under every kind of recomputation."""
    return [Case(m, layout, r) for layout in LAYOUTS for m in (METHODS | SPECIAL) for r in RECOMPUTE]


def quick() -> list[Case]:
    """A pairwise covering: every method meets every kind of split, every layout a method and every kind of recomputation some layouts.

    The special methods meet TP2xEP2 and CP2; SIS draws one uniform a token, which must not depend on which data-parallel rank has it, so
    it meets DP2 too. SORL's second backward and ACPO's pre-pass go through the deepest layouts.
    """
    used = dict.fromkeys(LAYOUTS, 0)
    turn = {name: islice(cycle(RECOMPUTE), first, None) for first, name in enumerate(LAYOUTS)}
    pairs = [("grpo", name) for name in LAYOUTS if name not in ("CP2xDP2", "CP2xPP2")]
    pairs += [("sorl", "TP2xPP2xEP2"), ("acpo_adaptive", "CP2xPP2")]
    pairs += [(method, name) for method in METHODS if method != "grpo" for name in _cover(used)]
    pairs += [(method, name) for method in SPECIAL for name in ("TP2xEP2", "CP2")] + [("sis", "DP2")]
    return [Case(method, name, next(turn[name])) for method, name in pairs]


def _cover(used: dict[str, int]) -> tuple[str, ...]:
    """The cheapest layouts that together split everything, those used least so far among equals; counts the use.

    expert_tensor is left out: no method sees how an expert is cut, and grpo on ETP2 tells whether the cut is right.
    """
    wanted = frozenset().union(*(layout.traits for layout in LAYOUTS.values())) - {"expert_tensor"}
    choices = [names for size in (2, 3, 4) for names in combinations(LAYOUTS, size)]
    covers = [names for names in choices if wanted <= frozenset().union(*(LAYOUTS[n].traits for n in names))]
    best = min(covers, key=lambda names: (sum(LAYOUTS[n].processes for n in names), sum(used[n] for n in names) / len(names)))
    used.update({n: used[n] + 1 for n in best})
    return best
