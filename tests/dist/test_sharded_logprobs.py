"""Vocabulary statistics over two and over four tensor-parallel ranks equal those of one process, padded vocabulary included."""

from __future__ import annotations

import pytest

from tests.dist.launch import run_ranks

pytestmark = pytest.mark.dist


def test_sharded_statistics_equal_the_whole() -> None:
    """Values, gradients, ties and padding-only shards: the worker compares, and fails with the statistic that differs."""
    assert "sharded statistics equal the whole" in run_ranks("logprobs.py", processes=4)
