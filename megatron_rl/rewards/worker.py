"""The process that runs other people's checkers, so that one that hangs can be killed.

Run as a file, never imported by the trainer: it must start without torch. It talks pickle over the connection whose file
descriptor is its second argument; the first is a JSON object {"kind": ..., ...}. It says ("ready", None) or ("missing", text) or
("invalid", text) once, then answers each (text, prompt fields) with ("score", float), ("invalid", text) or ("failed", traceback),
and ends when the other side closes.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Scorer = Callable[[str, dict[str, Any]], float]
"""(the answer's text, {"answer", "question", "metadata"} of the prompt) -> score."""


def math_verify_scorer() -> Scorer:
    """1.0 where math-verify finds the answer mathematically equal to the reference, else 0.0.

    Its own time limits rest on signal.alarm, which works in a main thread only and has turned every reward to zero elsewhere
    (huggingface/Math-Verify#50); they are off, the parent kills this process instead.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing time limit once an answer

    def score(text: str, prompt: dict[str, Any]) -> float:
        reference = prompt["answer"]
        marked = reference if "$" in reference or "\\boxed" in reference else f"${reference}$"
        gold = parse(marked, parsing_timeout=None)
        if not gold:
            raise ValueError(f"math-verify cannot read the reference answer {reference!r}; correct the row or take another verifier")
        return float(verify(gold, parse(text, parsing_timeout=None), timeout_seconds=None))

    return score


def reasoning_gym_scorer(task: str, task_args: dict[str, Any], marker: str) -> Scorer:
    """The score (0 to 1) that the task itself gives to the text after the last marker, or to all of it where none stands."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=0, size=1, **task_args)

    def score(text: str, prompt: dict[str, Any]) -> float:
        final = text.rpartition(marker)[2] if marker else text
        entry = {"question": prompt["question"], "answer": prompt["answer"], "metadata": prompt["metadata"]}
        return float(dataset.score_answer(final.strip(), entry))

    return score


SCORERS: dict[str, Callable[..., Scorer]] = {"math-verify": math_verify_scorer, "reasoning-gym": reasoning_gym_scorer}


def serve(scorer: Scorer, connection: Connection) -> None:
    """Answers until the other side closes. A checker's exception is sent back, not survived in silence."""
    while True:
        try:
            text, prompt = connection.recv()
        except EOFError:
            return
        try:
            reply: tuple[str, Any] = ("score", scorer(text, prompt))
        except ValueError as mistake:
            reply = ("invalid", str(mistake))
        except Exception:  # noqa: BLE001 - sent to the parent, which raises it
            reply = ("failed", traceback.format_exc())
        connection.send(reply)


def main() -> None:
    """Entry point of the child process."""
    options = json.loads(sys.argv[1])
    connection = Connection(int(sys.argv[2]))
    # What a checker prints must not mix into the trainer's output.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        scorer = SCORERS[options.pop("kind")](**options)
    except ImportError as missing:
        connection.send(("missing", str(missing)))
    except (TypeError, AssertionError, ValueError) as refused:
        connection.send(("invalid", str(refused)))
    else:
        connection.send(("ready", None))
        serve(scorer, connection)


if __name__ == "__main__":
    main()
