"""Worked examples to imitate, in the same record as sampled answers, so that both go down one data path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_rl.data.jsonl import read_rows
from megatron_rl.data.prompts import encode_prompts
from megatron_rl.types import Prompt, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_supervised(path: str | Path, tokenizer: PreTrainedTokenizerBase, eos: bool, *, chat_template: bool = False) -> list[Trajectory]:
    """Reads {"prompt", "completion"} lines; the loss falls on the completion and, with `eos`, on the end token after it.

    Prompt and completion are tokenised apart, as they are when the policy samples. Nobody sampled these tokens: behaviour_logp is
    NaN everywhere, there are no routes, and versions is 0 on the completion.

    Raises:
        ValueError: an unreadable row, an empty prompt or completion, or an empty file.
    """
    stem = Path(path).stem
    rows = [
        (f"{stem}:{number}", str(row["prompt"]), str(row["completion"]), str(row.get("answer", "")))
        for number, row in read_rows(path, ("prompt", "completion"))
    ]
    if not rows:
        raise ValueError(f'data.path: {str(path)!r} is empty; it needs one {{"prompt": ..., "completion": ...}} a line')
    prompts = encode_prompts(tokenizer, [prompt for _, prompt, _, _ in rows], chat_template=chat_template)
    completions = tokenizer([completion for _, _, completion, _ in rows], add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id] if eos else []
    trajectories = []
    for (name, text, completion, answer), prompt_ids, completion_ids in zip(rows, prompts, completions, strict=True):
        if not len(prompt_ids) or not completion_ids:
            raise ValueError(f"{path}: row {name} has an empty prompt or completion; remove the row")
        prompt = Prompt(id=name, tokens=prompt_ids, text=text, answer=answer)
        trajectories.append(_trajectory(prompt, [*completion_ids, *end], completion))
    return trajectories


def _trajectory(prompt: Prompt, completion: list[int], text: str) -> Trajectory:
    tokens = np.concatenate([prompt.tokens, np.asarray(completion, dtype=np.int32)])
    loss_mask = np.arange(len(tokens)) >= len(prompt.tokens)
    zero_on_completion = np.where(loss_mask, 0, -1).astype(np.int32)
    return Trajectory(
        prompt=prompt,
        group=prompt.id,
        tokens=tokens,
        loss_mask=loss_mask,
        behaviour_logp=np.full(len(tokens), np.nan, dtype=np.float32),
        versions=zero_on_completion,
        turns=zero_on_completion,
        routes=None,
        finish_reason="stop",
        text=text,
    )
