"""Verifiers; the ones of other packages run in their real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_rl.config import DataConfig, RewardConfig
from megatron_rl.rewards import Verifier, build, score_all
from megatron_rl.rewards.process import WorkerProcess
from megatron_rl.types import Prompt, Trajectory

TIMEOUT = 2.0
TOWER = "$9^{9^{9^{9}}}$"
"""sympy would never finish this number."""


def answer(text: str, reference: str, metadata: Mapping[str, Any] | None = None) -> Trajectory:
    zeros = np.zeros(2, dtype=np.int32)
    prompt = Prompt(id="p7", tokens=np.array([1], dtype=np.int32), text="question", answer=reference, metadata=metadata or {})
    return Trajectory(
        prompt=prompt,
        group="p7",
        tokens=zeros,
        loss_mask=np.array([False, True]),
        behaviour_logp=np.zeros(2, dtype=np.float32),
        versions=zeros,
        turns=zeros,
        routes=None,
        finish_reason="stop",
        text=text,
    )


@pytest.fixture(scope="module")
def math_verify() -> Iterator[Verifier]:
    verifier = build(RewardConfig(verifier="math-verify", timeout=TIMEOUT), DataConfig())
    yield verifier
    verifier.close()


@pytest.mark.parametrize(
    ("text", "marker", "reward"),
    [
        ("4-1=3;3-7=-4#-4", "#", 1.0),
        ("#5# -4 ", "#", 1.0),  # the last marker counts; white space does not
        ("-4", "#", 0.0),  # no marker
        ("#-40", "#", 0.0),
        ("#4", "#", 0.0),
        ("", "#", 0.0),
        ("-4", "", 1.0),  # an empty marker compares the whole text
        ("so -4", "", 0.0),
        ("the answer is -4", "answer is", 1.0),
    ],
)
def test_final_answer(text: str, marker: str, reward: float) -> None:
    assert build(RewardConfig(marker=marker), DataConfig()).score(answer(text, "-4")) == reward


def test_score_all_keeps_the_order_and_everything_else() -> None:
    given = [answer("#1", "1"), answer("#2", "1")]
    scored = score_all(build(RewardConfig(), DataConfig()), given)
    assert [one.reward for one in scored] == [1.0, 0.0]
    assert [one.text for one in scored] == ["#1", "#2"]
    assert given[0].reward is None


def test_a_reward_that_is_not_finite_is_an_error() -> None:
    class Broken:
        timeouts = 0

        def score(self, trajectory: Trajectory) -> float:
            return float("nan")

        def close(self) -> None: ...

    with pytest.raises(ValueError, match=r"Broken gave nan to an answer of prompt p7"):
        score_all(Broken(), [answer("#1", "1")])


@pytest.mark.parametrize(
    ("text", "reference", "reward"),
    [
        (r"The answer is $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        ("so it is 12", r"\frac{24}{2}", 1.0),
        ("$(1, 2)$", "$(1, 2)$", 1.0),
        ("so it is 11", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_math_verify_compares_mathematically(math_verify: Verifier, text: str, reference: str, reward: float) -> None:
    assert math_verify.score(answer(text, reference)) == reward


def test_math_verify_scores_alike_from_many_threads(math_verify: Verifier) -> None:
    # Where its time limit is signal.alarm, every reward given outside the main thread is 0 (or an exception).
    rewards: list[float] = []

    def work() -> None:
        rewards.append(math_verify.score(answer(r"$\frac{1}{2}$", "0.5")))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == [1.0] * 8


def test_an_answer_that_takes_too_long_earns_nothing_and_the_next_one_is_scored(math_verify: Verifier) -> None:
    before = math_verify.timeouts
    began = time.monotonic()
    assert math_verify.score(answer(TOWER, "3")) == 0.0
    assert time.monotonic() - began >= TIMEOUT
    assert math_verify.timeouts == before + 1
    assert math_verify.score(answer("$3$", "3")) == 1.0
    assert math_verify.timeouts == before + 1


def test_a_reference_nobody_can_read_is_the_users_error(math_verify: Verifier) -> None:
    with pytest.raises(ValueError, match=r"prompt p7: math-verify cannot read the reference answer ''"):
        math_verify.score(answer("3", ""))
    assert math_verify.score(answer("3", "3")) == 1.0


def test_reasoning_gym_asks_the_task() -> None:
    verifier = build(RewardConfig(verifier="reasoning-gym", timeout=10.0), DataConfig(task="chain_sum"))
    try:
        # chain_sum accepts a sign and decimals of zero, which an exact comparison would not.
        rewards = [one.reward for one in score_all(verifier, [answer(text, "4") for text in ("1+3=4#4", "+4.00", "#5")])]
        assert rewards == [1.0, 1.0, 0.0]
    finally:
        verifier.close()


def test_reasoning_gym_cannot_judge_other_questions() -> None:
    data = DataConfig(source="jsonl", path=__file__)
    with pytest.raises(ValueError, match=r"reward\.verifier: 'reasoning-gym' needs data\.source reasoning-gym, not 'jsonl'"):
        build(RewardConfig(verifier="reasoning-gym"), data)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A package of that name that cannot be imported stands in for one that is not installed.
    (tmp_path / "math_verify.py").write_text("raise ImportError('No module named math_verify')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs math-verify .*pip install 'megatron-rl\[math\]'"):
        build(RewardConfig(verifier="math-verify"), DataConfig())


def test_a_checker_that_fails_or_dies_is_an_error_not_a_zero(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "math_verify.py").write_text(
        "import os\n"
        "def parse(text, **options):\n"
        "    if 'die' in text: os._exit(3)\n"
        "    return 1 / 0 if 'fail' in text else [text]\n"
        "def verify(gold, found, **options): return True\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with WorkerProcess({"kind": "math-verify"}, TIMEOUT, package="math-verify", extra="math") as worker:
        prompt = {"answer": "1", "question": "", "metadata": {}}
        assert worker.score("fine", prompt) == 1.0
        with pytest.raises(RuntimeError, match=r"math-verify failed on 'fail'(?s:.*)ZeroDivisionError"):
            worker.score("fail", prompt)
        with pytest.raises(RuntimeError, match="died with exit code 3 while it scored 'die'"):
            worker.score("die", prompt)
