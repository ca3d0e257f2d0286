"""The questions a run asks, in an order that depends only on the seed and the step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatron_rl.config import DataConfig
from megatron_rl.data.jsonl import read_rows
from megatron_rl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

EVAL_SEED = 1_000
"""Held-out reasoning-gym questions come from this seed whatever train.seed is, so that runs are measured on the same ones."""
SEED_STRIDE = 10**8
"""reasoning-gym makes row i from seed + i: seeds this far apart share no row."""


@dataclass(frozen=True)
class Question:
    """One row before it is tokenised."""

    id: str
    text: str
    answer: str
    metadata: Mapping[str, Any]


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the Hugging Face checkpoint in folder `path`; nothing is fetched from anywhere.

    Raises:
        ValueError: the folder holds no tokenizer, or the tokenizer has no eos token.
    """
    from transformers import AutoTokenizer  # seconds to import, and --help must not wait for it

    if not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(f"model.path: {path!r} has no tokenizer.json; give a folder with a tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"model.path: {path!r}: its tokenizer has no eos token, so no answer could end; set eos_token in tokenizer_config.json"
        )
    return tokenizer


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, chat_template: bool) -> list[np.ndarray]:
    """Token ids (int32 [N] each) of questions, wrapped as a user turn when `chat_template`.

    Raises:
        ValueError: `chat_template` is asked for and the tokenizer has none.
    """
    if not texts:
        return []
    if chat_template:
        if tokenizer.chat_template is None:
            raise ValueError("data.chat_template: True, but the tokenizer has no chat template; set it to false or add chat_template.jinja")
        turns = [[{"role": "user", "content": text}] for text in texts]
        texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    # The template writes its own special tokens.
    encoded = tokenizer(list(texts), add_special_tokens=not chat_template)["input_ids"]
    return [np.asarray(ids, dtype=np.int32) for ids in encoded]


class PromptSource:
    """The questions of one split.

    Training questions come in a new permutation each epoch, seeded by (seed, epoch): the prompts of a step depend on
    (seed, step, count) alone, and a resumed run needs to know only the step. Held-out questions keep their order.
    """

    def __init__(self, config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, *, split: Literal["train", "eval"]) -> None:
        """Reads or makes all questions and tokenises them.

        Raises:
            ValueError: unreadable rows, a missing package, an unknown task, or no question left that fits
                data.max_prompt_tokens.
        """
        self._seed = seed
        self._shuffled = split == "train"
        questions = _questions(config, seed, split)
        tokens = encode_prompts(tokenizer, [question.text for question in questions], chat_template=config.chat_template)
        pairs = zip(questions, tokens, strict=True)
        fitting = [(question, ids) for question, ids in pairs if 0 < len(ids) <= config.max_prompt_tokens]
        if not fitting:
            raise ValueError(
                f"data.max_prompt_tokens: {config.max_prompt_tokens!r} leaves none of the {len(questions)} {split} prompts; "
                "raise it or check the data"
            )
        self.dropped = len(questions) - len(fitting)
        """Questions left out because they were empty or longer than data.max_prompt_tokens."""
        if self.dropped:
            logger.warning(
                "%d of %d %s prompts have more than data.max_prompt_tokens and are left out", self.dropped, len(questions), split
            )
        self.prompts: tuple[Prompt, ...] = tuple(
            Prompt(id=q.id, tokens=ids, text=q.text, answer=q.answer, metadata=q.metadata) for q, ids in fitting
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def batch(self, step: int, count: int) -> list[Prompt]:
        """The `count` prompts of step `step` (from 0): the next ones after those of the step before, over all leaders together."""
        assert step >= 0 and count >= 1, (step, count)
        size = len(self.prompts)
        positions = range(step * count, (step + 1) * count)
        orders = {epoch: self._order(epoch) for epoch in {position // size for position in positions}}
        return [self.prompts[orders[position // size][position % size]] for position in positions]

    def _order(self, epoch: int) -> Sequence[int]:
        size = len(self.prompts)
        return np.random.default_rng([self._seed, epoch]).permutation(size).tolist() if self._shuffled else range(size)


def _questions(config: DataConfig, seed: int, split: Literal["train", "eval"]) -> list[Question]:
    if config.source == "jsonl":
        return _from_jsonl(config, split)
    held_out = _from_reasoning_gym(config, config.eval_size, EVAL_SEED, "eval")
    if split == "eval":
        return held_out
    if seed == EVAL_SEED:
        raise ValueError(f"train.seed: {seed!r} is the seed of the held-out questions; take another")
    known = {question.text for question in held_out}
    questions = [question for question in _from_reasoning_gym(config, config.size, seed, "train") if question.text not in known]
    if not questions:
        raise ValueError(
            f"data.eval_size: {config.eval_size!r} held-out questions leave no {config.task!r} question to train on; "
            "lower it, or widen data.task_args"
        )
    return questions


def _from_jsonl(config: DataConfig, split: Literal["train", "eval"]) -> list[Question]:
    field, path = ("data.path", config.path) if split == "train" else ("data.eval_path", config.eval_path)
    if path is None:
        raise ValueError(f"{field}: None names no file of {split} prompts; set it to a .jsonl file")
    stem = Path(path).stem
    questions = []
    for number, row in read_rows(path, ("prompt", "answer")):
        rest = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
        questions.append(Question(f"{stem}:{number}", str(row["prompt"]), str(row["answer"]), rest))
    if not questions:
        raise ValueError(f'{field}: {path!r} is empty; it needs one {{"prompt": ..., "answer": ...}} a line')
    return questions


def _from_reasoning_gym(config: DataConfig, size: int, seed: int, split: str) -> list[Question]:
    dataset = create_reasoning_gym(config.task, config.task_args, size=size, seed=seed * SEED_STRIDE)
    return [
        Question(f"{config.task}:{split}:{seed}:{index}", entry["question"], str(entry["answer"]), entry["metadata"])
        for index, entry in enumerate(dataset[row] for row in range(size))
    ]


def create_reasoning_gym(task: str, task_args: Mapping[str, Any], *, size: int, seed: int) -> Any:
    """A reasoning-gym data set.

    Raises:
        ValueError: the package is missing, or it does not know the task or one of its parameters.
    """
    try:
        import reasoning_gym
    except ImportError as missing:
        raise ValueError(
            "data.source: 'reasoning-gym' needs the reasoning-gym package; install it with pip install 'megatron-rl[tasks]'"
        ) from missing
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(f"data.task: {task!r} is no reasoning-gym data set; it has {', '.join(sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **task_args)
    except (TypeError, AssertionError, ValueError) as refused:
        raise ValueError(f"data.task_args: {dict(task_args)!r} does not suit {task!r}: {refused}") from refused
