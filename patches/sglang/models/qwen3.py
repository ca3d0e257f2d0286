"""Dense Qwen3."""

from sglang.srt.models.qwen3 import EntryClass

__all__ = ["EntryClass"]
