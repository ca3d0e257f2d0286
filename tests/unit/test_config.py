"""The configuration tree: each refusal names field, value and remedy; files, options and --print_config agree."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_rl.command_line import UserError, config_keys, config_parser, parse_config
from megatron_rl.config import (
    CheckpointConfig,
    Config,
    CriticConfig,
    DataConfig,
    MethodConfig,
    ModelConfig,
    ModelFacts,
    OptimizerConfig,
    ParallelConfig,
    ReplayConfig,
    RolloutConfig,
    SyncConfig,
    TrainConfig,
    check_against_model,
    read_model_facts,
)
from megatron_rl.preflight import ranks_needed

ROOT = Path(__file__).resolve().parents[2]
QWEN3 = ModelFacts("Qwen3MoeForCausalLM", layers=48, heads=32, kv_heads=4, experts=128, vocab_size=151936, max_positions=40960)
SECTION = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "optimizer": OptimizerConfig,
    "rollout": RolloutConfig,
    "critic": CriticConfig,
    "sync": SyncConfig,
    "data": DataConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
}
TOO_SMALL = "must be at least 1"


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("model.logprob_chunk", 0, "must be positive"),
        *((f"parallel.{name}", 0, TOO_SMALL) for name in ("tensor", "pipeline", "expert", "context")),
        ("parallel.expert_tensor", 0, "must be at least 1, or null"),
        ("parallel.expert_tensor", 2, "must equal parallel.tensor = 1 when parallel.expert is 1; set it to null"),
        ("parallel.virtual_pipeline", 1, "must be at least 2, or null for none"),
        ("parallel.virtual_pipeline", 2, "needs parallel.pipeline >= 2"),
        ("optimizer.lr", 0.0, "must be positive"),
        ("optimizer.min_lr", 1.0, "must be between 0 and lr = 1e-06"),
        ("optimizer.warmup_steps", -1, "must not be negative"),
        ("optimizer.beta1", 1.0, "must be in [0, 1)"),
        ("optimizer.beta2", -0.1, "must be in [0, 1)"),
        *((f"rollout.{name}", 0, "must be positive") for name in ("max_new_tokens", "samples_per_prompt", "prompts_per_step", "tensor")),
        ("rollout.max_running_requests", 0, "must be positive"),
        ("rollout.resume_aborted", -1, "must not be negative; 0 ends the run at once"),
        ("rollout.temperature", 0.0, "must be positive"),
        ("rollout.top_p", 0.0, "must be in (0, 1]"),
        *(("rollout.top_k", value, "must be at least 2 (1 is greedy), or -1 for none") for value in (0, 1)),
        ("rollout.min_p", 1.0, "must be in [0, 1); 0 for none"),
        ("rollout.keep_sets", -1, "must not be negative; 0 for untruncated sampling"),
        ("critic.warmup_steps", -1, "must not be negative"),
        ("critic.clip", 0.0, "must be positive, or null for no clip"),
        ("rollout.launch", 0, "must be at least 1 when rollout.urls is empty"),
        ("sync.bucket_mb", 0.0, "must be positive"),
        ("sync.timeout", -1.0, "must be positive"),
        *((f"data.{name}", 0, "must be positive") for name in ("size", "eval_size", "max_prompt_tokens")),
        ("data.path", "/nowhere.jsonl", "is not a file; check the path"),
        ("data.eval_path", "/nowhere.jsonl", "is not a file; check the path"),
        ("checkpoint.every", -1, "must not be negative; 0 saves only at the end"),
        ("checkpoint.keep", 0, TOO_SMALL),
        *((f"train.{name}", 0, "must be positive") for name in ("steps", "mini_batches", "batch_size")),
        ("train.tokens_per_micro_batch", 7, "must be at least 8"),
        ("train.threads", -1, "must not be negative; 0 leaves torch's default"),
    ],
)
def test_a_field_refuses_what_cannot_work(field: str, value: Any, remedy: str) -> None:
    section, name = field.split(".")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        SECTION[section](**{name: value})
    assert str(caught.value) == f"{field}: {value!r} {remedy}"


TRUNCATIONS = ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.01})


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_truncated_sampling_must_say_what_it_left(truncation: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"rollout\.keep_sets: 0 must be positive: .* so every ratio would be biased; set it to top_k, or to"
    ):
        RolloutConfig(**truncation)
    assert RolloutConfig(**truncation, keep_sets=20).truncates


def test_keep_sets_of_everything_have_no_use() -> None:
    with pytest.raises(ValueError, match=r"rollout\.keep_sets: 20 has no use: top_p, top_k and min_p leave everything"):
        RolloutConfig(keep_sets=20)
    assert not RolloutConfig().truncates


def test_r2_replays_what_an_old_forward_recorded() -> None:
    with pytest.raises(
        ValueError, match=r"train\.old_policy: 'behaviour' leaves R2 without the old-policy forward .*; set it to recomputed"
    ):
        Config(replay=ReplayConfig(mode="R2"), train=TrainConfig(old_policy="behaviour"))
    Config(replay=ReplayConfig(mode="R3"), train=TrainConfig(old_policy="behaviour"))


def test_urls_and_sources_are_checked() -> None:
    with pytest.raises(ValueError, match=r"rollout\.urls: 'localhost:30000' must start with http:// or https://"):
        RolloutConfig(urls=("localhost:30000",))
    with pytest.raises(ValueError, match=r"data\.path: None must name a \.jsonl file when data\.source is jsonl"):
        DataConfig(source="jsonl")


def test_an_answer_must_fit_a_micro_batch() -> None:
    # 1000 prompt tokens and 32 new ones are 1032.
    with pytest.raises(ValueError, match=r"train\.tokens_per_micro_batch: 1024 cannot hold one answer: .* = 1032; raise it or lower those"):
        Config(data=DataConfig(max_prompt_tokens=1000), train=TrainConfig(tokens_per_micro_batch=1024))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 3}, "parallel.tensor: 3 must divide the model's 32 attention heads"),
        ({"tensor": 8}, "parallel.tensor: 8 must divide the model's 4 key-value heads"),
        ({"pipeline": 5}, "parallel.pipeline: 5 must divide the model's 48 layers"),
        (
            {"pipeline": 4, "virtual_pipeline": 5},
            "parallel.pipeline x parallel.virtual_pipeline: 20 must divide the model's 48 layers",
        ),
        ({"expert": 3}, "parallel.expert: 3 must divide the model's 128 experts"),
        # Zig-zag halves on 3 ranks: 2 x 3 = 6 does not divide 4096.
        (
            {"context": 3},
            "train.tokens_per_micro_batch: 4096 must be a multiple of 6 (tensor 1, context 3), or positions cannot be split evenly",
        ),
    ],
)
def test_a_layout_must_divide_the_model(parallel: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        check_against_model(Config(parallel=ParallelConfig(**parallel)), QWEN3)
    assert str(caught.value) == message


def test_a_dense_model_has_nothing_to_route() -> None:
    dense = dataclasses.replace(QWEN3, experts=0)
    with pytest.raises(ValueError, match=r"parallel\.expert: 2 must be 1: the model is dense"):
        check_against_model(Config(parallel=ParallelConfig(expert=2)), dense)
    with pytest.raises(ValueError, match=r"replay\.mode: 'R3' must be none: the model is dense and routes nothing"):
        check_against_model(Config(), dense)
    check_against_model(Config(replay=ReplayConfig(mode="none")), dense)


def test_an_answer_must_fit_the_models_positions() -> None:
    short = dataclasses.replace(QWEN3, max_positions=1055)  # one less than 1024 + 32
    with pytest.raises(ValueError, match=r"data\.max_prompt_tokens \+ rollout\.max_new_tokens: 1056 exceeds the model's 1055 positions"):
        check_against_model(Config(), short)


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(tensor=2, expert=2), 2),  # experts share the two tensor ranks
        (ParallelConfig(tensor=2), 2),  # without expert parallelism experts are cut by tensor parallelism
        (ParallelConfig(tensor=4, pipeline=2, expert=8), 16),  # dense 8, experts 16
        (ParallelConfig(tensor=3, expert=2), 6),  # dense 3, experts 2
        (ParallelConfig(expert=4, expert_tensor=2, tensor=2, context=2), 8),  # dense 4, experts 8
    ],
)
def test_the_fewest_ranks_of_a_layout(parallel: ParallelConfig, ranks: int) -> None:
    assert ranks_needed(parallel) == ranks
    parallel.check_world_size(ranks)
    parallel.check_world_size(3 * ranks)
    if ranks > 1:
        with pytest.raises(ValueError, match="parallel"):
            parallel.check_world_size(ranks + 1)


def test_model_facts_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.path: '' is not a folder"):
        read_model_facts("")
    with pytest.raises(ValueError, match=r"has no config\.json; give a folder in Hugging Face format"):
        read_model_facts(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "num_hidden_layers": 2}))
    with pytest.raises(ValueError, match=r"config\.json has no 'num_attention_heads'; is it a causal language model\?"):
        read_model_facts(str(tmp_path))
    (tmp_path / "config.json").write_text((ROOT / "examples/configs/qwen3_30b_a3b.json").read_text())
    assert read_model_facts(str(tmp_path)) == QWEN3


def parsed(*arguments: str) -> Config:
    return parse_config("megatron-rl train", "", arguments)


def test_files_then_options_later_ones_win(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        "optimizer: {lr: 3e-4, min_lr: 1e-5}\nobjective: {name: ppo, params: {clip_low: 0.1}}\nrollout: {urls: ['http://a:1']}\n"
    )
    second.write_text("optimizer: {min_lr: 2e-5}\ncorrections:\n- {name: tis, params: {cap: 3.0}}\n- name: geo_rs\n")
    config = parsed("--config", str(first), "--config", str(second), "--optimizer.lr", "1e-4", "--data.task_args", "{min_terms: 3}")
    assert config.optimizer == OptimizerConfig(lr=1e-4, min_lr=2e-5)
    assert (config.objective.name, config.objective.params) == ("ppo", {"clip_low": 0.1})
    assert config.corrections == (MethodConfig("tis", {"cap": 3.0}), MethodConfig("geo_rs"))
    assert config.rollout.urls == ("http://a:1",)
    assert config.data.task_args == {"min_terms": 3}
    assert parsed() == Config()


def test_print_config_is_a_file_for_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--parallel.virtual_pipeline", "2", "--parallel.pipeline", "2", "--corrections", "[{name: tis, params: {cap: 3.0}}]"]
    options += ["--rollout.urls", '["http://a:1", "http://b:2"]', "--objective.params", "{clip_low: 0.1}", "--rollout.base_port", "null"]
    with pytest.raises(SystemExit) as end:
        parsed(*options, "--print_config")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["rollout"]["base_port"] is None, "what is null is shown too"
    file = tmp_path / "printed.yaml"
    file.write_text(printed)
    assert parsed("--config", str(file)) == parsed(*options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer: {lrx: 1.0}", "optimizer.lrx: there is no such key; did you mean optimizer.lr?"),
        ("optimiser: {lr: 1.0}", "optimiser.lr: there is no such key; did you mean optimizer.lr?"),
        ("zzz: 1", "zzz: there is no such key; see megatron-rl train --help"),
        ("train: {steps: many}", "train.steps: 'many' does not fit; use int"),
        ("parallel: {expert: 0}", "parallel.expert: 0 must be at least 1"),
        ("data: {source: jsonl, path: /nowhere.jsonl}", "data.path: '/nowhere.jsonl' is not a file; check the path"),
    ],
)
def test_a_file_is_checked_like_options(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        parsed("--config", str(file))
    assert str(caught.value) == message


def test_a_file_that_is_no_yaml_says_where(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("optimizer: {lr: 1.0\n")
    with pytest.raises(UserError, match=r"^(?!.*\n).*line 1, column 12") as caught:
        parsed("--config", str(file))
    assert "\n" not in str(caught.value)


def test_every_key_is_an_option() -> None:
    defaults = config_parser("megatron-rl train", "").get_defaults()
    for key in config_keys():
        assert key in defaults, key


def test_the_table_of_fields_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "tools/config_table.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "|  |" not in (ROOT / "docs/configuration.md").read_text(), "every field says what it is"
