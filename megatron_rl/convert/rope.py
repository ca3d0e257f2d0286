"""Rotary position embeddings: what config.json says of them, and Megatron's arguments for the same frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["default", "linear", "llama3", "yarn"]

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron has these written into its code."""
_PARAMETERS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", *_LLAMA3}),
    "yarn": frozenset({"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
}


@dataclass(frozen=True)
class Rope:
    """How positions turn queries and keys."""

    theta: float
    kind: Kind
    parameters: Mapping[str, Any]
    """Those of the kind: a scaling factor and more."""

    def gpt_model(self) -> dict[str, Any]:
        """Arguments of GPTModel."""
        arguments: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": self.theta}
        if self.kind == "linear":
            arguments["seq_len_interpolation_factor"] = self.parameters["factor"]
        if self.kind == "llama3":
            arguments |= {"rope_scaling": True, "rope_scaling_factor": self.parameters["factor"]}
        if self.kind == "yarn":
            arguments["position_embedding_type"] = "yarn"
        return arguments

    def config_attributes(self) -> dict[str, Any]:
        """What GPTModel reads from attributes that TransformerConfig has no argument for."""
        if self.kind != "yarn":
            return {}
        names = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        given = self.latent_attention()
        return {f"yarn_{name}": given[name] for name in names} | {
            "yarn_correction_range_round_to_int": self.parameters.get("truncate", True)
        }

    def latent_attention(self) -> dict[str, Any]:
        """Arguments of MLATransformerConfig, whose attention has an embedding of its own."""
        if self.kind == "default":
            return {"rope_type": "rope", "rotary_base": self.theta, "rotary_scaling_factor": 1.0, "mscale_all_dim": 0.0}
        given = self.parameters
        scales = (given.get("mscale"), given.get("mscale_all_dim"))
        # transformers takes 0.1 ln(factor) + 1 unless both are there; Megatron says the same with 1 and 0.
        mscale, mscale_all_dim = scales if all(scales) else (1.0, 0.0)
        return {
            "rope_type": "yarn",
            "rotary_base": self.theta,
            "rotary_scaling_factor": given["factor"],
            "original_max_position_embeddings": given["original_max_position_embeddings"],
            "beta_fast": given.get("beta_fast") or 32.0,
            "beta_slow": given.get("beta_slow") or 1.0,
            "mscale": mscale,
            "mscale_all_dim": mscale_all_dim,
        }


def read_rope(config: Mapping[str, Any], family: str, kinds: tuple[Kind, ...]) -> Rope:
    """From config.json. transformers 5 writes rope_parameters, transformers 4 rope_theta and rope_scaling.

    Args:
        family: named in errors.
        kinds: those that Megatron computes for this family.

    Raises:
        ValueError: another kind, a parameter that is unknown or that Megatron cannot express, or no rope_theta.
    """
    given = {"rope_theta": config.get("rope_theta"), **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = given.pop("rope_theta")
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind not in kinds:
        allowed = " or ".join(repr(k) for k in kinds)
        raise ValueError(f"config.json: rope scaling of type {kind!r} is not supported for {family}; only {allowed}")
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"config.json: partial_rotary_factor is not supported for {family}; only 1.0")
    if unknown := sorted(given.keys() - _PARAMETERS[kind]):
        raise ValueError(f"config.json: rope parameters {unknown} are unknown for {family}")
    if theta is None:
        raise ValueError("config.json: rope_theta is missing, both by itself and in rope_parameters")
    if missing := sorted({"factor", "original_max_position_embeddings"} & _PARAMETERS[kind] - given.keys()):
        raise ValueError(f"config.json: rope parameters {missing} are missing; {kind} scaling needs them")
    _check_expressible(kind, given)
    return Rope(float(theta), kind, given)


def _check_expressible(kind: str, given: Mapping[str, Any]) -> None:
    if kind == "llama3":
        for name, value in _LLAMA3.items():
            if given.get(name) != value:
                raise ValueError(
                    f"config.json: rope parameter {name} = {given.get(name)!r} is not supported; Megatron has {value} built in"
                )
    if kind == "yarn" and given.get("mscale_all_dim") and not given.get("mscale"):
        raise ValueError("config.json: rope parameter mscale_all_dim without mscale is not supported; Megatron scales both or neither")
