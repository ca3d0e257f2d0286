"""`megatron-rl lab measure`, all of it, on a server that runs already: SGLang in fp32 against the trainer, and with int8 weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.lab.records import Measurement
from megatron_rl.lab.summary import summarise
from megatron_rl.rollout.fleet import Fleet

pytestmark = pytest.mark.engine

CONFIG = """
rollout: {{urls: [{url}], dtype: float32, prompts_per_step: 6, samples_per_prompt: 4, max_new_tokens: 32}}
engines: [{{name: fp32, dtype: float32}}, {{name: int8, dtype: float32, quantisation: int8}}]
model: {{path: {model}}}
grid: {{dtypes: [float32, bfloat16], layers: 2, candidates: 512}}
lag: {{source: steps, lags: [1], optimizer: {{lr: 1.0e-3}}}}
data: {{size: 20, eval_size: 1, max_prompt_tokens: 128}}
tokens_per_micro_batch: 512
"""
ENGINES_AGREE = 2e-5
"""Nats: fp32 against fp32, as in test_agreement.py."""


@pytest.fixture(scope="module")
def found(tiny_moe: Path, engine: Fleet, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lab")
    config = folder / "lab.yaml"
    config.write_text(CONFIG.format(url=engine.urls[0], model=tiny_moe))
    out = folder / "out"
    command = [sys.executable, "-m", "megatron_rl", "lab", "measure", "--config", str(config), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [Path(line).name for line in done.stdout.splitlines()] == ["measurement.json", "summary.json", "report.html"]
    return out, json.loads((out / "summary.json").read_text())


def test_fp32_engines_agree_within_their_rounding(found: tuple[Path, dict[str, Any]]) -> None:
    engine = found[1]["engines"]["fp32"]
    assert engine["tokens"] == 6 * 4 * 32 or engine["mean_length"] < 32
    for name in ("live fp32", "R3 fp32"):
        condition = engine["conditions"][name]
        assert condition["max_abs_d"] < ENGINES_AGREE
        assert condition["route_mismatch_share"] == 0.0
        assert condition["floor"]["max_abs_d"] < ENGINES_AGREE
    assert engine["floor"]["trainer repeated, live fp32"]["max_abs_d"] == 0.0
    assert engine["conditions"]["R3 bf16"]["max_abs_d"] > 10 * ENGINES_AGREE, "bf16 is seen"


def test_staleness_and_quantisation_are_told_apart(found: tuple[Path, dict[str, Any]]) -> None:
    """fp32 engines have next to no numerics: a step is all staleness, int8 weights are all of what the engine computes otherwise."""
    engines = found[1]["engines"]
    stale = engines["fp32"]["conditions"]["live fp32 lag 1"]["attribution"]
    assert stale["orders"][0]["variance_share"]["staleness"] > 0.99
    quantised = engines["int8"]["conditions"]["R3 fp32"]
    assert quantised["attribution"]["orders"][0]["variance_share"]["numerics"] == pytest.approx(1.0, abs=1e-6)
    assert quantised["attribution"]["within"]["numerics"]["quantisation"] > 0.99
    assert engines["int8"]["conditions"]["R3 fp32 int8 weights"]["max_abs_d"] < ENGINES_AGREE


def test_the_bounds_of_dvp_hold_with_the_noise_of_the_whole_vocabulary(found: tuple[Path, dict[str, Any]]) -> None:
    """The engine named all 512 log-probs, so the noise is exact and the three bounds are theorems."""
    laws = found[1]["engines"]["fp32"]["law"]
    assert {"live fp32", "R3 fp32", "live fp32 lag 1"} <= set(laws)
    for law in laws.values():
        bounds = law["bounds"]
        assert [bounds[name]["inside_share"] for name in ("exact", "slope", "smaller")] == [1.0, 1.0, 1.0]


def test_the_files_belong_together(found: tuple[Path, dict[str, Any]]) -> None:
    out, summary = found
    assert json.loads(json.dumps(summarise(Measurement.load(out)))) == summary
    assert (out / "report.html").stat().st_size > 100_000
    assert not list((out / "servers").glob("*")), "nothing was launched"


def test_the_server_has_its_own_weights_again(found: tuple[Path, dict[str, Any]], engine: Fleet) -> None:
    assert engine.versions() == ("0",)
