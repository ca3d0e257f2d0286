"""Whether a server serves the model that is trained, in the way that training needs. Checked before anything is sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config import ModelFacts
from megatron_rl.rollout.routes import RouteShape

TESTED_VERSION = "0.5.23"


@dataclass(frozen=True)
class Served:
    """What a server says of itself."""

    url: str
    server: Mapping[str, Any]
    """/server_info"""
    model: Mapping[str, Any]
    """/model_info"""
    vocab_size: int


def check_served(served: Served, facts: ModelFacts, shape: RouteShape | None, *, dtype: str, routes: bool, keep_sets: int = 0) -> None:
    """Raises ValueError, naming the server, the value and the remedy, where it cannot be the behaviour policy of this trainer."""

    def require(condition: bool, what: str, remedy: str) -> None:
        if not condition:
            raise ValueError(f"{served.url}: {what}; {remedy}")

    version = served.server.get("version")
    require(version == TESTED_VERSION, f"SGLang {version} runs there", f"this package was tested with {TESTED_VERSION} only: install that")
    architectures = list(served.model.get("architectures") or [])
    require(
        facts.architecture in architectures,
        f"it serves {', '.join(architectures) or 'an unknown architecture'}, but model.path holds {facts.architecture}",
        "start it with --model-path of the same model",
    )
    require(
        served.vocab_size == facts.vocab_size,
        f"its vocabulary has {served.vocab_size} tokens, but model.path says {facts.vocab_size}",
        "start it with --model-path of the same model",
    )
    require(
        served.server.get("dtype") == dtype,
        f"it computes in {served.server.get('dtype')}, but rollout.dtype is {dtype}",
        f"start it with --dtype {dtype} or change rollout.dtype",
    )
    if routes:
        require(
            bool(served.server.get("enable_return_routed_experts")),
            "it does not return routed experts, which replay.mode R3 needs",
            "start it with --enable-return-routed-experts",
        )
        require(
            shape is not None,
            "routes are asked for, but the model is dense",
            "set replay.mode to none",
        )
        require(
            not served.server.get("enable_hierarchical_cache"),
            "it has a hierarchical cache, whose host hits return wrong expert rows (sgl-project/sglang#26975)",
            "start it without --enable-hierarchical-cache",
        )
    limit = int(served.server.get("sampling_mask_max_tokens", 0))
    require(
        not keep_sets or limit > keep_sets,
        f"it returns keep-sets of {limit} tokens at most, and rollout.keep_sets = {keep_sets} takes one more",
        f"start it with --sampling-mask-max-tokens {2 * keep_sets}",
    )
    require(
        served.server.get("dp_size", 1) == 1,
        f"it runs {served.server.get('dp_size')} data-parallel replicas, which distributed weight updates do not reach",
        "start one server a replica and list them in rollout.urls",
    )
