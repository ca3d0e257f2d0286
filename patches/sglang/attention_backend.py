"""``--attention-backend torch_batched``: one attention call for many requests, where SGLang's CPU backend loops over them."""

from __future__ import annotations

from megatron_rl_patches.core import Anchor, Patch

from .version import SGLANG, TESTED

NAME = "torch_batched"


def register_backend() -> None:
    """Make the name known to SGLang's argument parser and to its registry of attention backends."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])

    @register_attention_backend(NAME)
    def create(model_runner: object) -> object:
        from .batched_backend import TorchBatchedAttnBackend

        return TorchBatchedAttnBackend(model_runner)


ATTENTION_BACKEND = Patch(
    name="torch-batched-attention",
    dependency=SGLANG,
    reason="torch_native loops over requests in Python: three quarters of a decode step at batch 128.",
    upstream="none",
    versions=TESTED,
    removal="torch_native, or another backend that runs without AMX, attends for the whole batch at once",
    anchors=(
        Anchor("srt/layers/attention/attention_registry.py", r"^def register_attention_backend\(name\):$"),
        Anchor("srt/arg_groups/choices.py", r"^add_attention_backend_choices = ATTENTION_BACKEND_CHOICES\.extend$"),
        Anchor("srt/layers/attention/torch_native_backend.py", r"^    def _run_sdpa_forward_extend\($"),
        Anchor("srt/layers/attention/torch_native_backend.py", r"^        for seq_idx in range\(seq_lens\.shape\[0\]\):$"),
        Anchor("srt/layers/attention/torch_native_backend.py", r"^    def _run_sdpa_forward_decode\($"),
    ),
    apply=register_backend,
)
