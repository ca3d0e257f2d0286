"""Import-time stand-ins for two packages SGLang imports on CPU but that are not there.

* ``sgl_kernel``: a finder at the END of ``sys.meta_path``, so an installed one always wins.
* ``torchvision``: visible only to the import statements of the two SGLang modules in ``TORCHVISION_USERS``. It never
  enters ``sys.modules``, because transformers decides what it can do by asking ``importlib.util.find_spec("torchvision")``
  and would believe a stand-in that it could see.

Both are inert until applied, which ``launch_server`` does in every process of a server on a machine without CUDA.
"""

from __future__ import annotations

import builtins
import enum
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megatron_rl_patches.core import Anchor, Patch

from .version import SGLANG, TESTED

SGL_KERNEL_STANDIN = Path(__file__).with_name("sgl_kernel_standin.py")
TORCHVISION_USERS = ("sglang.srt.configs.deepseek_ocr", "sglang.srt.multimodal.internvl_utils")
"""SGLang modules that every server imports and that import torchvision at their top."""


class SglKernelFinder:
    """Meta-path finder that serves ``sgl_kernel_standin`` as ``sgl_kernel``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "sgl_kernel":
            return None
        return importlib.util.spec_from_file_location(fullname, SGL_KERNEL_STANDIN)


class InterpolationMode(enum.Enum):
    """The members of ``torchvision.transforms.functional.InterpolationMode`` (their values are upstream's)."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _raise_on_use(name: str) -> NoReturn:
    raise NotImplementedError(f"torchvision is not installed, so {name} is missing. Install torchvision to serve models that take images.")


def _torchvision_modules() -> dict[str, ModuleType]:
    """Return stand-ins for ``torchvision``, ``.transforms`` and ``.transforms.functional``, keyed by full name."""
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    package, transforms, functional = (ModuleType(name) for name in names)
    vars(package).update(transforms=transforms)
    vars(transforms).update(functional=functional, InterpolationMode=InterpolationMode, __getattr__=_raise_on_use)
    vars(functional).update(InterpolationMode=InterpolationMode, __getattr__=_raise_on_use)
    return dict(zip(names, (package, transforms, functional), strict=True))


def _import_with(standins: Mapping[str, ModuleType]) -> Callable[..., ModuleType]:
    """Return an ``__import__`` that answers for ``standins`` itself and passes every other name on."""

    def scoped_import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        if level == 0 and name in standins:
            # `from a.b import c` wants a.b; `import a.b [as c]` wants a, and walks down from there.
            return standins[name] if fromlist else standins[name.partition(".")[0]]
        return builtins.__import__(name, globals, locals, fromlist, level)

    return scoped_import


class _TorchvisionUserLoader(importlib.machinery.SourceFileLoader):
    """Executes one module with builtins of its own, whose ``__import__`` knows the torchvision stand-in."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import_with(_torchvision_modules())}
        super().exec_module(module)


class TorchvisionUserFinder:
    """Meta-path finder that loads ``TORCHVISION_USERS``, and nothing else, through ``_TorchvisionUserLoader``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in TORCHVISION_USERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            return None
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=_TorchvisionUserLoader(fullname, spec.origin))


def install_sgl_kernel() -> None:
    """Serve the stand-in as ``sgl_kernel``, behind every other finder."""
    sys.meta_path.append(SglKernelFinder())


def install_torchvision() -> None:
    """Show ``TORCHVISION_USERS`` the stand-in, unless torchvision is installed."""
    if importlib.util.find_spec("torchvision") is None:
        # First, because these modules are on the path and the ordinary finder would take them.
        sys.meta_path.insert(0, TorchvisionUserFinder())


SGL_KERNEL = Patch(
    name="sgl-kernel-standin",
    dependency=SGLANG,
    reason="The CPU path imports sgl_kernel at module level, and the package index has no CPU build of it.",
    upstream="none",
    versions=TESTED,
    removal="sgl_kernel has CPU wheels on the package index, or SGLang imports it only with AMX",
    anchors=(
        Anchor("srt/mem_cache/allocation.py", r"^    from sgl_kernel import assign_req_to_token_pool_cpu$"),
        Anchor("kernels/ops/kvcache/cache_move.py", r"^    from sgl_kernel import copy_all_layer_kv_cache_cpu$"),
    ),
    apply=install_sgl_kernel,
)
TORCHVISION = Patch(
    name="torchvision-standin",
    dependency=SGLANG,
    reason="Two modules that every server imports need torchvision at their top, for image models only.",
    upstream="none",
    versions=TESTED,
    removal="these imports move into the functions that use them",
    anchors=(
        Anchor("srt/configs/deepseek_ocr.py", r"^from torchvision\.transforms import InterpolationMode$"),
        Anchor("srt/multimodal/internvl_utils.py", r"^import torchvision\.transforms as T$"),
    ),
    apply=install_torchvision,
)
