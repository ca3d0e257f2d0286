"""Fixtures for every room. The servers are real, cost about 25 CPU-seconds each, and are therefore started once a session, on demand."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.config import ModelConfig, RolloutConfig
from megatron_rl.rollout.fleet import Fleet

CONTEXT = 512
"""Tokens of prompt and answer that the shared servers take."""


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the quickstart's Qwen3-MoE: 4 layers, 8 experts, top-2, 512 tokens, fp32 weights that nothing was trained on."""
    from tools.make_tiny_moe import TinyModel, make_tiny_moe

    return make_tiny_moe(tmp_path_factory.mktemp("tiny_moe"), TinyModel())


def _start(model: Path, dtype: str, log_dir: Path) -> Fleet:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("needs sglang: tools/install.sh installs it")
    config = RolloutConfig(dtype=dtype)  # type: ignore[arg-type]
    return Fleet.start(config, ModelConfig(path=str(model)), routes=True, log_dir=log_dir, context_length=CONTEXT)


@pytest.fixture(scope="session")
def engine(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fp32 server with routes on, serving `tiny_moe` as version 0. Whoever pushes weights puts those and the version back."""
    with _start(tiny_moe, "float32", tmp_path_factory.mktemp("engine")) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def engine_bf16(tiny_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """As `engine`, but it computes in bf16, so that it routes some tokens otherwise than an fp32 trainer."""
    with _start(tiny_moe, "bfloat16", tmp_path_factory.mktemp("engine_bf16")) as fleet:
        yield fleet
