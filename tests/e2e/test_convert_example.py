"""The example that a user runs first: a Hugging Face folder to Megatron and back, compared on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.convert.inspection import compare
from tests.dist.launch import ROOT


@pytest.mark.slow
def test_the_example_ends_with_the_same_model(tmp_path: Path) -> None:
    env = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(["bash", "examples/convert.sh"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout and "A by transformers, B by megatron" in done.stdout
    assert list(compare(tmp_path / "hf", tmp_path / "tiny")) == []
