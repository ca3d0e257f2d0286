"""Prompts, worked examples and the files they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config import DataConfig
from megatron_rl.data.prompts import PromptSource, load_tokenizer
from megatron_rl.data.supervised import load_supervised
from tools.make_tiny_moe import EOS_ID, build_tokenizer

TOKENIZER = build_tokenizer()


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def ten(tmp_path: Path) -> DataConfig:
    path = write_jsonl(tmp_path / "ten.jsonl", [{"prompt": f"{i}+1=", "answer": i + 1, "level": i} for i in range(10)])
    return DataConfig(source="jsonl", path=path, eval_path=path)


def test_an_epoch_asks_every_question_once_and_the_next_one_in_another_order(ten: DataConfig) -> None:
    source = PromptSource(ten, TOKENIZER, seed=3, split="train")
    epochs = [[prompt.id for step in range(5 * epoch, 5 * epoch + 5) for prompt in source.batch(step, 2)] for epoch in range(2)]
    assert len(source) == 10
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(prompt.id for prompt in source.prompts)
    assert epochs[0] != epochs[1]


def test_a_resumed_run_needs_only_the_step(ten: DataConfig) -> None:
    whole = PromptSource(ten, TOKENIZER, seed=3, split="train")
    before = [[prompt.id for prompt in whole.batch(step, 3)] for step in range(12)]
    resumed = PromptSource(ten, TOKENIZER, seed=3, split="train")
    assert [prompt.id for prompt in resumed.batch(7, 3)] == before[7]
    other = PromptSource(ten, TOKENIZER, seed=4, split="train")
    assert [[prompt.id for prompt in other.batch(step, 3)] for step in range(12)] != before


def test_a_batch_may_span_epochs(ten: DataConfig) -> None:
    # Positions 8 .. 11 of a ten-question set: two of the first epoch, two of the second.
    source = PromptSource(ten, TOKENIZER, seed=0, split="train")
    single = [source.batch(step, 1)[0].id for step in range(12)]
    assert [prompt.id for prompt in source.batch(2, 4)] == single[8:12]


def test_held_out_questions_keep_their_order_whatever_the_seed(ten: DataConfig) -> None:
    source = PromptSource(ten, TOKENIZER, seed=9, split="eval")
    assert [prompt.text for prompt in source.batch(0, 10)] == [f"{i}+1=" for i in range(10)]


def test_a_row_becomes_tokens_answer_and_metadata(ten: DataConfig) -> None:
    prompt = PromptSource(ten, TOKENIZER, seed=0, split="eval").prompts[4]
    assert (prompt.id, prompt.text, prompt.answer, prompt.metadata) == ("ten:5", "4+1=", "5", {"level": 4})
    assert prompt.tokens.dtype == np.int32
    assert TOKENIZER.decode(prompt.tokens) == "4+1="


def test_the_chat_template_makes_a_user_turn(ten: DataConfig) -> None:
    prompt = PromptSource(replace(ten, chat_template=True), TOKENIZER, seed=0, split="eval").prompts[0]
    assert TOKENIZER.decode(prompt.tokens) == "<|im_start|>user\n0+1=<|im_end|>\n<|im_start|>assistant\n"
    bare = build_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"data\.chat_template: True, but the tokenizer has no chat template"):
        PromptSource(replace(ten, chat_template=True), bare, seed=0, split="eval")


def test_long_prompts_are_counted_and_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1+1+1=", "answer": "4"}])
    source = PromptSource(DataConfig(source="jsonl", path=path, max_prompt_tokens=4), TOKENIZER, seed=0, split="train")
    assert (len(source), source.dropped) == (1, 1)
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens: 3 leaves none of the 2 train prompts"):
        PromptSource(DataConfig(source="jsonl", path=path, max_prompt_tokens=3), TOKENIZER, seed=0, split="train")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"bad\.jsonl:2: not JSON"),
        ("[1]", r"bad\.jsonl:2: \[1\] is not an object with the keys prompt, answer"),
        ('{"prompt": "x"}', r"bad\.jsonl:2: 'answer' is None; it must be text or a number"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "1=", "answer": "1"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        PromptSource(DataConfig(source="jsonl", path=str(path)), TOKENIZER, seed=0, split="train")


def test_a_missing_held_out_file_is_named(ten: DataConfig) -> None:
    with pytest.raises(ValueError, match=r"data\.eval_path: None names no file"):
        PromptSource(DataConfig(source="jsonl", path=ten.path), TOKENIZER, seed=0, split="eval")


def test_reasoning_gym_never_trains_on_a_held_out_question() -> None:
    # 200 two-term one-digit sums exist, so 60 held-out and 400 training rows must meet.
    config = DataConfig(task_args={"min_terms": 2, "max_terms": 2, "max_digits": 1}, size=400, eval_size=60)
    held_out = PromptSource(config, TOKENIZER, seed=0, split="eval")
    assert len(held_out) == 60
    known = {prompt.text for prompt in held_out.prompts}
    train = PromptSource(config, TOKENIZER, seed=0, split="train")
    assert 0 < len(train) < 400
    assert known.isdisjoint(prompt.text for prompt in train.prompts)
    again = PromptSource(config, TOKENIZER, seed=7, split="eval")
    assert [prompt.text for prompt in again.prompts] == [prompt.text for prompt in held_out.prompts]


def test_reasoning_gym_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"data\.task: 'chain_summ' is no reasoning-gym data set; it has .*chain_sum"):
        PromptSource(DataConfig(task="chain_summ"), TOKENIZER, seed=0, split="train")
    with pytest.raises(ValueError, match=r"data\.task_args: \{'terms': 3\} does not suit 'chain_sum'"):
        PromptSource(DataConfig(task_args={"terms": 3}), TOKENIZER, seed=0, split="train")


def test_worked_examples_carry_loss_on_completion_and_end_token(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "teacher.jsonl", [{"prompt": "4-1=", "completion": "#3"}])
    (example,) = load_supervised(path, TOKENIZER, eos=True)
    # Four prompt bytes, two completion bytes, the end token.
    assert example.loss_mask.tolist() == [False] * 4 + [True] * 3
    assert example.tokens[-1] == EOS_ID
    assert TOKENIZER.decode(example.tokens[:-1]) == "4-1=#3"
    assert example.versions.tolist() == example.turns.tolist() == [-1] * 4 + [0] * 3
    assert np.isnan(example.behaviour_logp).all()
    assert example.routes is None
    (bare,) = load_supervised(path, TOKENIZER, eos=False)
    assert bare.tokens.tolist() == example.tokens[:-1].tolist()


def test_an_empty_completion_is_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "teacher.jsonl", [{"prompt": "1=", "completion": ""}])
    with pytest.raises(ValueError, match="row teacher:1 has an empty prompt or completion"):
        load_supervised(path, TOKENIZER, eos=True)


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: .* has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    TOKENIZER.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).eos_token_id == EOS_ID
