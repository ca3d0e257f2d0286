"""Every method in every mode that changes its formula: the list that the generic tests run through."""

from __future__ import annotations

from typing import Any

OBJECTIVES: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("ppo", {"dual_clip": None, "clip_high": 0.28}),
    ("grpo", {}),
    ("dr_grpo", {}),
    ("dapo_dynamic", {}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("gspo_token", {"clip_low": 0.1, "clip_high": 0.1}),
    ("gmpo", {}),
    ("gmpo", {"clip": 0.1}),
    ("cispo", {}),
    ("cispo", {"clip_low": 0.2, "unified_mask": True}),
    ("cispo", {"anchor": "theta/mu"}),
    ("sapo", {}),
    ("sspo", {}),
    ("sspo", {"gate": "sigmoid", "coordinate": "ratio", "tau_pos": 2.0, "tau_neg": 2.0}),
    ("sspo", {"gate": "erf"}),
    ("sspo", {"gate": "softsign", "coordinate": "ratio", "tau_neg": 1.5}),
    ("minirl", {}),
    ("minirl", {"weight_cap": 1.5}),
    ("minpro", {}),
    ("minpro", {"clip_low": 0.2, "anchor": "theta/old"}),
    ("pnpo", {}),
    ("ctpo", {}),
    ("ctpo", {"power": 0.0, "low": 0.2, "high": 0.3, "dual_clip": False}),
    ("epic", {}),
    ("epic", {"gradient": "prefix", "generator": "forward", "delta": 0.2}),
    ("epic", {"gradient": "prefix", "anchor": "theta/old"}),
    ("nfpo", {}),
    ("nfpo", {"steps": 4, "divergence": "top_k_kl", "threshold": 0.02}),
    ("vespo", {}),
    ("vespo", {"anchor": "theta/old"}),
    ("drpo", {}),
    ("dppo", {"threshold": 0.05}),
    ("dppo", {"divergence": "binary_kl", "threshold": 0.02, "ratio_cap": 1.2}),
    ("dppo", {"divergence": "top_k_tv", "threshold": 0.1, "anchor": "theta/old"}),
    ("dppo", {"divergence": "top_k_kl", "threshold": 0.05, "ratio_cap": None, "candidates": 3}),
    ("cppo", {}),
    ("cppo", {"soft": True, "threshold": 0.1}),
    ("cppo", {"budget_rule": "quantile", "budget": 0.02, "divergence": "top_k_tv"}),
    ("sis", {}),
    ("acpo_advantage", {}),
    ("acpo_advantage", {"alpha": 0.5}),
    ("acpo_adaptive", {}),
    ("acpo_adaptive", {"bins": 2, "base": 0.05, "alpha": 0.2, "dual_clip": None}),
    ("sorl", {"clip_low": 0.1, "clip_high": 0.1}),
    ("rspo", {}),
    ("rspo", {"base": "grpo", "gamma_min": 0.8}),
    ("rspo", {"base": "gspo", "base_params": {"clip_high": 0.2, "clip_low": 0.2}}),
    ("direct_advantage", {}),
    ("direct_advantage", {"beta": 0.5, "base": "reference"}),
    ("direct_advantage", {"beta": 2.0, "base": "mu"}),
    ("policy_gradient", {}),
    ("policy_gradient", {"weight": "theta/old"}),
    ("policy_gradient", {"weight": "none"}),
    ("nll", {}),
]

CORRECTIONS: list[tuple[str, dict[str, Any]]] = [
    ("tis", {}),
    ("tis", {"level": "sequence", "cap": 1.2}),
    ("tis", {"level": "geometric", "pair": "theta/mu"}),
    ("tis", {"level": "turn"}),
    ("mis", {}),
    ("mis", {"level": "token", "low": 0.8, "high": 1.2}),
    ("icepop", {"low": 0.8, "high": 1.2}),
    ("geo_rs", {"low": 0.95, "high": 1.05}),
    ("geo_rs", {"low": 0.7, "level": "sequence"}),
    ("veto", {"low": 0.7}),
    ("veto", {"low": 0.5, "high": 1.3, "pair": "theta/mu"}),
    ("snis", {}),
    ("snis", {"level": "token", "cap": 1.3}),
    ("trm", {"criterion": "max"}),
    ("trm", {"criterion": "mean", "mean_threshold": 0.05}),
    ("trm", {"criterion": "both", "max_threshold": 0.3, "mean_threshold": 0.1}),
    ("trm", {"criterion": "max", "source": "top_k", "max_threshold": 0.2}),
    ("trm", {"criterion": "max", "source": "exact", "max_threshold": 0.15}),
    ("trm", {"criterion": "mean", "source": "exact", "mean_threshold": 0.05, "pair": "theta/old"}),
    ("trm", {"criterion": "length_neutral", "ratio_threshold": 0.4}),
    ("trm", {"criterion": "ser", "ratio_threshold": 0.3}),
    ("trm", {"criterion": "mean", "mean_threshold": 0.02, "pair": "old/mu"}),
    ("opsm", {}),
    ("m2po", {}),
    ("mis_po", {"geo_low": 0.8, "geo_high": 1.2}),
    ("kpop", {"upper": 0.02}),
]

RESTRICTIONS: list[tuple[str, dict[str, Any]]] = [
    ("dvp", {}),
    ("dvp", {"support": "keep_sets"}),
    ("dvp", {"support": "unpruned"}),
    ("dvp", {"support": "unpruned", "reach": "suffix"}),
    ("dvp", {"support": "unpruned", "reach": "sequence"}),
    ("keep_sets", {}),
]

PENALTIES: list[tuple[str, dict[str, Any]]] = [
    ("kl_penalty", {"beta": 0.1}),
    ("kl_penalty", {"beta": 0.1, "base": "mu", "estimator": "k2"}),
    ("kl_penalty", {"beta": 0.1, "base": "old", "estimator": "k1"}),
]

Case = tuple[str, dict[str, Any], list[tuple[str, dict[str, Any]]]]
STACKS: list[Case] = [
    *[(name, params, []) for name, params in OBJECTIVES],
    *[("policy_gradient", {}, [correction]) for correction in (*CORRECTIONS, *RESTRICTIONS)],
    *[("ppo", {}, [penalty]) for penalty in PENALTIES],
    ("grpo", {}, [("tis", {}), ("geo_rs", {}), ("veto", {}), ("kl_penalty", {})]),
    ("acpo_adaptive", {}, [("m2po", {}), ("snis", {})]),
    ("ctpo", {}, [("dvp", {"support": "unpruned", "reach": "suffix"}), ("mis", {"pair": "theta/mu"})]),
]


def label(case: Any) -> str:
    """A readable test id."""
    if not isinstance(case, tuple):
        return str(case)
    name, params, *corrections = case
    inside = ",".join(f"{k}={v}" for k, v in params.items())
    above = "".join(f"+{n}[{','.join(f'{k}={v}' for k, v in p.items())}]" for n, p in (corrections[0] if corrections else []))
    return f"{name}[{inside}]{above}"
