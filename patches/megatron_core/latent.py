"""Multi-head latent attention where Transformer Engine is not installed."""

from __future__ import annotations

from ..core import Anchor, Patch
from .version import MEGATRON_CORE, V0_16


def know_that_te_is_missing() -> None:
    """0.16's `multi_latent_attention` takes the stand-ins that it imports for Transformer Engine's classes."""
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE


LATENT_ATTENTION_TE = Patch(
    name="latent-attention-te",
    dependency=MEGATRON_CORE,
    reason="multi_latent_attention.HAVE_TE is True without Transformer Engine, whose classes are mocks then: isinstance raises TypeError.",
    upstream="none (0.19 imports HAVE_TE)",
    versions=(V0_16,),
    removal="0.16 is no longer supported",
    anchors=(
        Anchor("transformer/multi_latent_attention.py", r"import Linear\n\n    HAVE_TE = True\nexcept ImportError:"),
        Anchor("transformer/multi_latent_attention.py", r"HAVE_TE\s+and isinstance\(self\.linear_proj, TELinear\)"),
        Anchor("extensions/transformer_engine.py", r"te = MagicMock\(\)\s+HAVE_TE = False"),
    ),
    apply=know_that_te_is_missing,
)
