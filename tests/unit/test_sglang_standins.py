"""What makes SGLang importable without CUDA: seen by SGLang only, loud when used, and refused for an untested SGLang."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from megatron_rl_patches import core
from megatron_rl_patches.sglang import attention_backend, launch_server, plugin, sgl_kernel_standin, standins

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are never installed where there is CUDA")


@pytest.fixture
def nothing_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without patches, whose environment and meta path are restored afterwards."""
    monkeypatch.setattr(core, "_active", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(os, "environ", os.environ.copy())


def _load(spec: ModuleSpec | None) -> ModuleType:
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _torchvision_user(folder: Path, body: str) -> ModuleSpec | None:
    """Spec for a module with the name of one of TORCHVISION_USERS and another body."""
    (folder / "internvl_utils.py").write_text(body)
    return standins.TorchvisionUserFinder().find_spec("sglang.srt.multimodal.internvl_utils", [str(folder)])


def test_torchvision_is_seen_by_its_user_and_by_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    elsewhere = importlib.util.find_spec("torchvision")
    body = """
import importlib.util
import torchvision.transforms as T
import torchvision
from torchvision.transforms.functional import InterpolationMode
from torchvision.transforms import functional as TF
probe = importlib.util.find_spec("torchvision")
def late():
    from torchvision.transforms import InterpolationMode as again
    return again
"""
    module = _load(_torchvision_user(tmp_path, body))
    assert module.T is module.torchvision.transforms
    assert module.TF.InterpolationMode is module.InterpolationMode is module.late()
    assert module.InterpolationMode.BICUBIC.value == "bicubic"  # the value torchvision gives it
    # What transformers asks. Both while the user runs and after it, the answer is that of a machine without the stand-in.
    assert module.probe == elsewhere
    assert importlib.util.find_spec("torchvision") == elsewhere
    assert "torchvision" not in sys.modules


def test_other_modules_are_left_to_other_finders(tmp_path: Path) -> None:
    (tmp_path / "conversation.py").write_text("")
    assert standins.TorchvisionUserFinder().find_spec("sglang.srt.parser.conversation", [str(tmp_path)]) is None
    assert standins.SglKernelFinder().find_spec("sgl_kernel_npu") is None
    assert standins.SglKernelFinder().find_spec("sgl_kernel.flash_attn") is None


def test_using_torchvision_raises(tmp_path: Path) -> None:
    module = _load(_torchvision_user(tmp_path, "import torchvision.transforms as T"))
    with pytest.raises(NotImplementedError, match=r"ToTensor is missing\. Install torchvision"):
        module.T.ToTensor()


def test_sgl_kernel_stand_in_writes_the_token_table_and_refuses_the_rest() -> None:
    module = _load(standins.SglKernelFinder().find_spec("sgl_kernel"))
    table = torch.zeros(3, 4, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([3, 1])
    module.assign_req_to_token_pool_cpu(rows, table, start, end, torch.tensor([7, 8, 9]), 4)
    # Row 2 takes the first two slots at positions 1 and 2, row 0 the third at position 0.
    assert table.tolist() == [[9, 0, 0, 0], [0, 0, 0, 0], [0, 7, 8, 0]]
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.fused_experts has no CPU stand-in.*torch_batched"):
        module.fused_experts(1, x=2)
    assert not hasattr(module, "ScalarType")


@pytest.mark.parametrize("probe", ["__path__", "_C", "FlashInfer"])
def test_sgl_kernel_probes_for_what_is_no_kernel_say_no(probe: str) -> None:
    assert not hasattr(sgl_kernel_standin, probe)


@without_cuda
def test_an_installed_sgl_kernel_wins(nothing_active: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core.apply_patch(standins.SGL_KERNEL)
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    (tmp_path / "sgl_kernel.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("sgl_kernel")
    assert spec is not None
    assert spec.origin == str(tmp_path / "sgl_kernel.py")


@without_cuda
def test_an_untested_sglang_is_refused(nothing_active: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    (tmp_path / "sglang" / "_version.py").write_text("__version__ = version = '0.5.24'\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    with pytest.raises(RuntimeError, match=r"tested on sglang 0\.5\.23, but 0\.5\.24 is installed"):
        launch_server.prepare_process()
    with pytest.raises(RuntimeError, match=r"tested on sglang 0\.5\.23, but 0\.5\.24 is installed"):
        plugin.register()
    assert sys.meta_path == finders
    assert "SGLANG_USE_CPU_ENGINE" not in os.environ


def test_with_cuda_nothing_happens(nothing_active: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delitem(os.environ, "SGLANG_USE_CPU_ENGINE", raising=False)
    finders = list(sys.meta_path)
    launch_server.prepare_process()
    plugin.register()
    assert sys.meta_path == finders
    assert core.active() == ()
    assert "SGLANG_USE_CPU_ENGINE" not in os.environ
    with pytest.raises(RuntimeError, match="machines without CUDA"):
        core.apply_patch(attention_backend.ATTENTION_BACKEND)


@without_cuda
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang's sources")
def test_preparing_twice_installs_once(nothing_active: None) -> None:
    before = len(sys.meta_path)
    launch_server.prepare_process()
    once = len(sys.meta_path)
    launch_server.prepare_process()
    assert before < once == len(sys.meta_path)
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1"


def test_a_missing_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_server, "entry_points", lambda group: [])
    with pytest.raises(RuntimeError, match=r"pip install \./patches"):
        launch_server.check_plugin()
