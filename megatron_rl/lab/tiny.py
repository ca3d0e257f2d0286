"""A tiny random Qwen3-MoE (or dense Qwen3) checkpoint in Hugging Face format, with a real tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, EOS_ID = 0, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the checkpoint; the defaults give 1.12 million parameters."""

    vocab: int = 512
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    topk: int = 2
    ffn: int = 64
    """Width of one expert."""
    dense_ffn: int = 256
    """Width of a dense model's feed-forward layer."""
    max_positions: int = 4096
    init: float = 0.05
    """Standard deviation of the weights."""
    head: float = 1.0
    """What the output layer's weights are multiplied by: above 1 the model is surer of its next token."""
    dense: bool = False
    """Qwen3 instead of Qwen3-MoE."""
    tied: bool = False
    """Whether the output layer shares the embedding's weights."""
    seed: int = 0

    def __post_init__(self) -> None:
        smallest = len(SPECIAL_TOKENS) + len(pre_tokenizers.ByteLevel.alphabet())
        checks = [
            (self.vocab >= smallest, "vocab", self.vocab, f"must be at least {smallest}: every byte and the special tokens"),
            (self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"must divide the {self.heads} heads"),
            (self.head > 0 and not (self.tied and self.head != 1), "head", self.head, "must be positive, and 1 where embeddings are tied"),
            (self.dense or 1 <= self.topk <= self.experts, "topk", self.topk, f"must be between 1 and the {self.experts} experts"),
        ]
        for holds, name, value, remedy in checks:
            if not holds:
                raise ValueError(f"{name}: {value!r} {remedy}")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: one token a byte, so digits are single and any text can be said; eos is <|im_end|>."""
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[EOS_ID], pad_token=SPECIAL_TOKENS[PAD_ID], chat_template=CHAT_TEMPLATE
    )


def build_model(sizes: TinyModel) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    """The random model in fp32; the same sizes and seed give the same weights."""
    model = _random_model(sizes)
    with torch.no_grad():
        model.lm_head.weight.mul_(sizes.head)
    return model


def _random_model(sizes: TinyModel) -> Qwen3ForCausalLM | Qwen3MoeForCausalLM:
    torch.manual_seed(sizes.seed)
    shared = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.dense_ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.max_positions,
        "initializer_range": sizes.init,
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    if sizes.dense:
        return Qwen3ForCausalLM(Qwen3Config(**shared)).float()
    config = Qwen3MoeConfig(
        **shared,
        moe_intermediate_size=sizes.ffn,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.topk,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    return Qwen3MoeForCausalLM(config).float()


def make_tiny_moe(out: str | Path, sizes: TinyModel | None = None) -> Path:
    """Writes the checkpoint to folder `out` (made if missing) and returns it."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    build_model(sizes or TinyModel()).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
