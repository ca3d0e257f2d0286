"""Mixtures of experts made from dense models: where they start, what noise and new units change, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from megatron_rl.cli import main
from megatron_rl.convert.activations import measure
from megatron_rl.convert.experts import Upcycling
from megatron_rl.convert.inspection import describe
from megatron_rl.convert.upcycle import upcycle
from tools.make_tiny_moe import TinyModel, build_tokenizer, make_tiny_moe

SIZES = {
    "vocab_size": 300,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": 2,
}
TOKENS = torch.arange(3, 27)[None]


def make(folder: Path, model: Any) -> Path:
    """Random biases too, which transformers starts at zero, and norms that are not 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(("norm" in name) + 0.3 * torch.randn(parameter.shape, generator=generator))
        model.model.layers[1].mlp.down_proj.weight.mul_(30)  # what keep_above is to find
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return make(tmp_path_factory.mktemp("llama"), LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return make(tmp_path_factory.mktemp("qwen"), Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)))


def logits(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(TOKENS).logits


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def expert(tensors: dict[str, Tensor], layer: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and down of a Mixtral's expert, each with its units as rows."""
    w1, w2, w3 = (tensors[f"model.layers.{layer}.block_sparse_moe.experts.{number}.{name}.weight"] for name in ("w1", "w2", "w3"))
    return w1, w3, w2.t()


def dense(tensors: dict[str, Tensor], layer: int) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = (tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return gate, up, down.t()


def test_identical_experts_of_a_mixtral_give_the_dense_logits_up_to_rounding(llama: Path, tmp_path: Path) -> None:
    upcycle(llama, tmp_path / "moe", Upcycling(experts=4))
    found = describe(tmp_path / "moe")
    assert (found.family, found.moe_layers, found.experts) == ("Mixtral", 3, 4)
    # Logits are of order 1 and fp32 has 6e-8: two gates that sum to 1 round differently from one feed-forward layer.
    assert (logits(tmp_path / "moe") - logits(llama)).abs().max() < 2e-5


def test_the_output_layer_is_written_although_the_dense_model_ties_it(llama: Path, tmp_path: Path) -> None:
    upcycle(llama, tmp_path / "moe", Upcycling(experts=2, router="norm", keep_above=None))
    assert json.loads((tmp_path / "moe" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(weights(tmp_path / "moe")["lm_head.weight"], weights(llama)["model.embed_tokens.weight"])


@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_a_shared_expert_gives_the_dense_logits_exactly(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    upcycle(folder, tmp_path / "moe", Upcycling(family="qwen2_moe", experts=4, expert_width=8))
    assert torch.equal(logits(tmp_path / "moe"), logits(folder))


def test_padded_heads_leave_the_logits_and_get_no_gradient(llama: Path, tmp_path: Path) -> None:
    upcycle(llama, tmp_path / "moe", Upcycling(experts=4, kv_heads=4))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", dtype=torch.float32)
    # 3 groups of 2 queries of 4 become 4 groups of 2: 8 heads, 32 hidden entries.
    assert (model.config.num_attention_heads, model.config.num_key_value_heads, model.config.hidden_size) == (8, 4, 32)
    assert (logits(tmp_path / "moe") - logits(llama)).abs().max() < 2e-5
    model(TOKENS, labels=TOKENS).loss.backward()
    padding = {"input_layernorm.weight": 24, "q_proj.weight": 24, "k_proj.weight": 12, "v_proj.weight": 12, "o_proj.weight": 24}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        for end, start in padding.items():
            if name.endswith(end):
                assert torch.all(parameter.grad[start:] == 0), name
        if parameter.shape[-1] == 32:  # entries of the hidden state, or heads, in any matrix
            assert torch.all(parameter.grad[..., 24:] == 0), name
            assert torch.any(parameter.grad[..., :24] != 0), name


def test_noise_is_a_share_of_the_dense_deviation_and_spares_kept_layers(llama: Path, tmp_path: Path) -> None:
    kept = upcycle(llama, tmp_path / "moe", Upcycling(experts=3, noise=0.1, keep_layers=(2,), keep_above=None))
    assert kept == (2,)
    ours, theirs = weights(tmp_path / "moe"), weights(llama)
    for layer in range(3):
        for number in range(3):
            for mine, plain in zip(expert(ours, layer, number), dense(theirs, layer), strict=True):
                # 960 draws: the standard error of a deviation is 1 / sqrt(1920) = 2.3 % of it.
                added = float((mine - plain).std() / plain.std())
                assert added == 0.0 if layer == 2 else abs(added - 0.1) < 0.01
    assert not torch.equal(expert(ours, 0, 0)[0], expert(ours, 0, 1)[0])
    assert (logits(tmp_path / "moe") - logits(llama)).abs().max() > 1e-2


def test_new_units_are_the_asked_share_and_the_same_in_all_three_matrices(llama: Path, tmp_path: Path) -> None:
    upcycle(llama, tmp_path / "moe", Upcycling(experts=3, partial_reinit=0.25, keep_above=None))
    ours, theirs = weights(tmp_path / "moe"), weights(llama)
    chosen = []
    for number in range(3):
        changed = [(mine != plain).any(1) for mine, plain in zip(expert(ours, 0, number), dense(theirs, 0), strict=True)]
        assert int(changed[0].sum()) == 10  # a quarter of 40
        assert torch.equal(changed[0], changed[1]) and torch.equal(changed[0], changed[2])
        chosen.append(changed[0])
    assert not torch.equal(chosen[0], chosen[1])


def test_layers_with_massive_outputs_keep_identical_experts(llama: Path, tmp_path: Path) -> None:
    outputs = [layer.largest for layer in measure(llama)]
    assert outputs[1] > 4 * max(outputs[0], outputs[2])  # the layer whose down-projection is 30 times as large
    threshold = outputs[1] / 2
    options = Upcycling(experts=2, noise=0.1, partial_reinit=0.1, keep_above=threshold)
    assert upcycle(llama, tmp_path / "moe", options) == (1,)
    ours, theirs = weights(tmp_path / "moe"), weights(llama)
    same = [all(torch.equal(a, b) for a, b in zip(expert(ours, layer, 0), dense(theirs, layer), strict=True)) for layer in range(3)]
    assert same == [False, True, False]


def test_measured_routers_ignore_the_mean_input_and_have_the_asked_deviation(llama: Path, tmp_path: Path) -> None:
    upcycle(llama, tmp_path / "moe", Upcycling(experts=4, router_std=1.5))
    ours = weights(tmp_path / "moe")
    for number, layer in enumerate(measure(llama)):
        scores_TN = layer.inputs_TH @ ours[f"model.layers.{number}.block_sparse_moe.gate.weight"].t()
        assert scores_TN.mean(0).abs().max() < 1e-4
        torch.testing.assert_close(scores_TN.std(0), torch.full((4,), 1.5), rtol=1e-4, atol=0)


def test_the_seed_decides_and_one_more_expert_leaves_the_others(llama: Path, tmp_path: Path) -> None:
    made = {}
    for name, experts, seed in (("a", 2, 0), ("b", 3, 0), ("c", 2, 1)):
        upcycle(llama, tmp_path / name, Upcycling(experts=experts, noise=0.1, router="norm", keep_above=None, seed=seed))
        made[name] = expert(weights(tmp_path / name), 1, 1)[0]
    assert torch.equal(made["a"], made["b"])
    assert not torch.equal(made["a"], made["c"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 2, "top_k": 3}, "top_k: 3 must be at most the 2 experts"),
        ({"top_k": 1}, "top_k: 1 must be at least 2"),
        ({"experts": 1}, "experts: 1 must be at least 2"),
        ({"noise": -0.1}, "noise: -0.1 must be 0 or more"),
        ({"partial_reinit": 1.5}, "partial_reinit: 1.5 must be between 0 and 1"),
        ({"expert_width": 8}, "expert_width: 8 is for --family qwen2_moe"),
        ({"family": "qwen2_moe", "expert_width": 41}, "expert_width: 41 must be between 1 and the dense width 40"),
        ({"keep_layers": (3,)}, "keep_layers: 3 must be between 0 and 2"),
        ({"kv_heads": 2}, "kv_heads: 2 must be at least the model's 3"),
        ({"prompts": "missing.txt"}, "prompts: 'missing.txt' is no file"),
    ],
)
def test_impossible_options_are_named(llama: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        upcycle(llama, tmp_path / "moe", Upcycling(**options))
    assert not (tmp_path / "moe").exists()


def test_models_that_no_target_can_hold_are_refused(qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family: 'mixtral' has no attention biases, and this Qwen2 model has; use --family qwen2_moe"):
        upcycle(qwen, tmp_path / "moe")
    tiny = TinyModel(vocab=300, hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, dense_ffn=16, dense=True)
    with pytest.raises(ValueError, match="a Qwen3 model cannot be upcycled; only Llama and Qwen2"):
        upcycle(make_tiny_moe(tmp_path / "qwen3", tiny), tmp_path / "moe")


def test_a_model_without_a_tokenizer_is_upcycled_without_measuring(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((llama / "config.json").read_text())
    save_file(weights(llama), bare / "model.safetensors")
    assert main(["convert", "upcycle", str(bare), str(tmp_path / "moe")]) == 2
    assert "has no tokenizer to measure with; add one, or pass --router norm --keep_above null" in capsys.readouterr().err
    command = ["convert", "upcycle", str(bare), str(tmp_path / "moe"), "--experts", "2", "--router", "norm", "--keep_above", "null"]
    assert main([*command, "--dtype", "bfloat16"]) == 0
    assert describe(tmp_path / "moe").dtypes == {"BF16": describe(tmp_path / "moe").tensors}
