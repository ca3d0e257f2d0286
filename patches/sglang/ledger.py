"""The patches of SGLang, by the moment at which they are applied."""

from __future__ import annotations

from megatron_rl_patches.core import Patch

from .attention_backend import ATTENTION_BACKEND
from .bf16_products import BF16_PRODUCTS
from .grouped_experts import GROUPED_EXPERTS
from .host_buffers import HOST_BUFFERS
from .standins import SGL_KERNEL, TORCHVISION
from .start_method import START_METHOD

BEFORE_IMPORT: tuple[Patch, ...] = (SGL_KERNEL, TORCHVISION)
"""Without these SGLang cannot be imported; ``launch_server`` applies them."""

IN_PLUGIN: tuple[Patch, ...] = (HOST_BUFFERS, ATTENTION_BACKEND, GROUPED_EXPERTS, BF16_PRODUCTS, START_METHOD)
"""SGLang calls ``plugin.register`` for these in each of its processes."""

PATCHES: tuple[Patch, ...] = (*BEFORE_IMPORT, *IN_PLUGIN)
