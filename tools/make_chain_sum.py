"""Make the quickstart's data: reasoning-gym chain_sum, three to four terms of one digit, with worked steps.

    python tools/make_chain_sum.py --out runs/data

Writes three files of JSON lines to --out:
  train.jsonl    {"prompt": "4-1-7=", "answer": "-4"}
                 for reinforcement learning
  teacher.jsonl  {"prompt": "4-1-7=", "completion": "4-1=3;3-7=-4#-4"}
                 for the supervised start; each step slips with probability --noise
  eval.jsonl     {"prompt": ..., "answer": ...}
                 distinct prompts that occur in neither of the others

The held-out file depends on --eval-seed alone, so runs with different seeds are measured on the same questions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import reasoning_gym

SLIPS = (-10, -2, -1, 1, 2, 10)
"""What the noisy teacher adds to a step's result; later steps work on with it."""
SEED_STRIDE = 10**8
"""reasoning-gym makes row i from seed + i: seeds this far apart share no row."""


@dataclass(frozen=True)
class Sizes:
    """How much to make."""

    train: int = 30000
    teacher: int = 30000
    eval: int = 512
    noise: float = 0.25
    """Probability that the teacher slips in a step."""
    min_terms: int = 3
    max_terms: int = 4
    seed: int = 0
    eval_seed: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise: {self.noise!r} must be in [0, 1)")
        if not 2 <= self.min_terms <= self.max_terms:
            raise ValueError(f"min_terms: {self.min_terms!r} must be at least 2 and at most max_terms = {self.max_terms}")
        for name in ("train", "teacher", "eval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)!r} must be at least 1")
        if self.seed == self.eval_seed:
            raise ValueError(f"seed: {self.seed!r} is the held-out file's seed; take another, or another eval_seed")
        # 10 digits a term and 2 signs between terms; half of them must be left to train on.
        possible = sum(10**terms * 2 ** (terms - 1) for terms in range(self.min_terms, self.max_terms + 1))
        if self.eval > possible // 2:
            raise ValueError(f"eval: {self.eval!r} is more than half of the {possible} possible sums; lower it or raise max_terms")


def questions(sizes: Sizes, seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs such as ("4-1-7=", "-4"), the same for the same seed."""
    dataset = reasoning_gym.create_dataset(
        "chain_sum",
        seed=seed * SEED_STRIDE,
        size=SEED_STRIDE,
        min_terms=sizes.min_terms,
        max_terms=sizes.max_terms,
        min_digits=1,
        max_digits=1,
    )
    for index in itertools.count():
        entry = dataset[index]
        yield entry["metadata"]["expression"].replace(" ", "") + "=", entry["answer"]


def worked_steps(prompt: str, noise: float, rng: random.Random) -> str:
    """The completion "a+b=c;c-d=e#e" of "a+b-d=", where each step slips with probability `noise`."""
    first, *rest = re.findall(r"\d+|[+-]", prompt)
    total, steps = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(number) if sign == "+" else total - int(number)
        if rng.random() < noise:
            result += rng.choice(SLIPS)
        steps.append(f"{total}{sign}{number}={result}")
        total = result
    return f"{';'.join(steps)}#{total}"


def make_chain_sum(out: str | Path, sizes: Sizes | None = None) -> Path:
    """Writes the three files to folder `out` (made if missing) and returns it."""
    sizes = sizes or Sizes()
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    distinct = dict(itertools.islice(_distinct(questions(sizes, sizes.eval_seed)), sizes.eval))
    seen = (pair for pair in questions(sizes, sizes.seed) if pair[0] not in distinct)
    rng = random.Random(sizes.seed)
    train = itertools.islice(seen, sizes.train)
    _write(folder / "train.jsonl", ({"prompt": prompt, "answer": answer} for prompt, answer in train))
    teacher = itertools.islice(seen, sizes.teacher)
    _write(folder / "teacher.jsonl", ({"prompt": prompt, "completion": worked_steps(prompt, sizes.noise, rng)} for prompt, _ in teacher))
    _write(folder / "eval.jsonl", ({"prompt": prompt, "answer": answer} for prompt, answer in distinct.items()))
    return folder


def _distinct(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    known: set[str] = set()
    for prompt, answer in pairs:
        if prompt not in known:
            known.add(prompt)
            yield prompt, answer


def _write(file: Path, rows: Iterable[dict[str, str]]) -> None:
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    default = Sizes()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--train", type=int, default=default.train, help=f"rows of train.jsonl, default {default.train}")
    parser.add_argument("--teacher", type=int, default=default.teacher, help=f"rows of teacher.jsonl, default {default.teacher}")
    parser.add_argument("--eval", type=int, default=default.eval, help=f"rows of eval.jsonl, default {default.eval}")
    parser.add_argument(
        "--noise", type=float, default=default.noise, help=f"share of steps in which the teacher slips, default {default.noise}"
    )
    parser.add_argument("--min-terms", type=int, default=default.min_terms, help=f"default {default.min_terms}")
    parser.add_argument("--max-terms", type=int, default=default.max_terms, help=f"default {default.max_terms}")
    parser.add_argument("--seed", type=int, default=default.seed, help=f"of train and teacher, default {default.seed}")
    parser.add_argument("--eval-seed", type=int, default=default.eval_seed, help=f"default {default.eval_seed}")
    options = vars(parser.parse_args(argv))
    out = options.pop("out")
    sizes = Sizes(**options)
    folder = make_chain_sum(out, sizes)
    print(f"{folder}: {sizes.train} train, {sizes.teacher} teacher ({sizes.noise:.0%} of the steps slip), {sizes.eval} held-out rows")


if __name__ == "__main__":
    main()
