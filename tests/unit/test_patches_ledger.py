"""The rules every patch obeys: guards, idempotence, anchors that are there, and a ledger that lists exactly what exists."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from megatron_rl_patches import core, megatron_core
from megatron_rl_patches.check import check
from megatron_rl_patches.core import Anchor, Dependency, Patch
from megatron_rl_patches.megatron_core import factories
from megatron_rl_patches.megatron_core.norm import RMSNorm
from megatron_rl_patches.megatron_core.version import MEGATRON_CORE
from megatron_rl_patches.sglang import ledger as sglang_ledger

REPO = Path(__file__).resolve().parents[2]
OVERLAY = REPO / ".overlays" / "megatron-core-0.19.2"
PATCHES = (*megatron_core.PATCHES, *sglang_ledger.PATCHES)


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_patches", REPO / "tools" / "check_patches.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_patches = _load_tool()


@pytest.fixture
def nothing_active(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which no patch was applied yet (another test may have called install())."""
    monkeypatch.setattr(core, "_active", {})


@pytest.fixture
def probe() -> tuple[Patch, list[str]]:
    """A patch of megatron-core that only counts its applications."""
    calls: list[str] = []
    patch = dataclasses.replace(megatron_core.PATCHES[0], name="probe", apply=lambda: calls.append("applied"))
    return patch, calls


@pytest.fixture
def megatron_sources(tmp_path: Path) -> Path:
    """A copy of the files of megatron-core that anchors and version are read from."""
    root = MEGATRON_CORE.root()
    files = {anchor.path for patch in megatron_core.PATCHES for anchor in patch.anchors} | {MEGATRON_CORE.version_file}
    for path in files:
        if (root / path).is_file():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / path, tmp_path / path)
    return tmp_path


# --- guards ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_active")
def test_a_patch_is_applied_once_and_then_active(probe: tuple[Patch, list[str]]) -> None:
    patch, calls = probe
    core.apply_patch(patch)
    core.apply_patch(patch)
    assert calls == ["applied"]
    assert core.active() == (patch,)


@pytest.mark.usefixtures("nothing_active")
def test_an_untested_version_is_refused_with_both_versions_and_the_remedy(
    probe: tuple[Patch, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, calls = probe
    monkeypatch.setattr(Dependency, "installed_version", lambda self: "0.20.0")
    with pytest.raises(
        RuntimeError, match=r"tested on megatron-core 0\.16\.1, 0\.19\.2, but 0\.20\.0 is installed.*pip install megatron-core=="
    ):
        core.apply_patch(patch)
    assert calls == [] and core.active() == ()


@pytest.mark.usefixtures("nothing_active")
def test_install_refuses_an_untested_version_before_it_touches_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dependency, "installed_version", lambda self: "0.20.0")
    current_device = torch.cuda.current_device
    with pytest.raises(RuntimeError, match=r"but 0\.20\.0 is installed"):
        megatron_core.install()
    assert torch.cuda.current_device is current_device


@pytest.mark.usefixtures("nothing_active")
def test_a_cpu_only_patch_is_refused_with_cuda_and_another_is_not(probe: tuple[Patch, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    patch, calls = probe
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="this machine has CUDA"):
        core.apply_patch(patch)
    core.apply_patch(dataclasses.replace(patch, cpu_only=False))
    assert calls == ["applied"]


@pytest.mark.usefixtures("nothing_active")
def test_install_does_nothing_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    megatron_core.install()
    assert core.active() == ()


@pytest.mark.usefixtures("nothing_active")
def test_install_after_the_first_import_of_megatron_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    # The version is looked up first, through import machinery that a bare module would confuse.
    monkeypatch.setattr(Dependency, "installed_version", lambda self: "0.16.1")
    with pytest.raises(RuntimeError, match=r"Call install\(\) before the first import of megatron\.core"):
        megatron_core.install()


def test_a_dependency_that_is_not_installed_says_so() -> None:
    for package in ("no_such_package", "no_such_package.core"):
        with pytest.raises(ModuleNotFoundError, match="no-such is not installed"):
            Dependency("no-such", package, "version.py", "").root()


# --- anchors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.dependency.distribution}:{patch.name}")
def test_every_anchor_is_in_the_installed_sources(patch: Patch) -> None:
    # Given the whole set, so that a patch for another tested version is "not needed" rather than "untested".
    reports = {(report.dependency, report.patch): report for report in check(PATCHES)}
    report = reports[patch.dependency.distribution, patch.name]
    assert report.ok, report
    assert patch.anchors, "a patch without an anchor cannot tell when it is out of date"


@pytest.mark.skipif(not OVERLAY.is_dir(), reason="tools/install.sh puts megatron-core 0.19.2 there")
def test_every_anchor_is_in_the_other_supported_megatron() -> None:
    reports = check(megatron_core.PATCHES, {"megatron-core": OVERLAY / "megatron" / "core"})
    assert {report.version for report in reports} == {"0.19.2"}
    assert {report.patch: report.status for report in reports if report.status != "found"} == {
        "te-general-gemm": "not needed",
        "latent-attention-te": "not needed",
    }


def test_a_changed_source_is_reported_and_exits_1(megatron_sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = megatron_sources / "tensor_parallel" / "random.py"
    source.write_text(source.read_text().replace("_lazy_call(cb)", "cb()"))
    assert check_patches.main(["--json", "--root", f"megatron-core={megatron_sources}"]) == 1
    reports = json.loads(capsys.readouterr().out)
    assert [(report["patch"], report["status"]) for report in reports if not report["ok"]] == [("rng-fork", "missing")]
    assert [report["missing"] for report in reports if not report["ok"]] == [[r"tensor_parallel/random.py: ^    _lazy_call\(cb\)"]]


def test_a_deleted_source_is_missing_too(megatron_sources: Path) -> None:
    (megatron_sources / "jit.py").unlink()
    reports = check(megatron_core.PATCHES, {"megatron-core": megatron_sources})
    assert [report.patch for report in reports if report.status == "missing"] == ["jit-fuser"]


def test_an_untested_version_is_reported_and_exits_1(megatron_sources: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version = megatron_sources / MEGATRON_CORE.version_file
    version.write_text(re.sub(r"MINOR = \d+", "MINOR = 99", version.read_text()))
    assert check_patches.main(["--root", f"megatron-core={megatron_sources}"]) == 1
    assert re.search(r"megatron-core 0\.99\.\d+ +rng-fork +untested", capsys.readouterr().out)


def test_the_installed_dependencies_pass_and_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_patches.main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PATCHES)  # a line a patch


@pytest.mark.parametrize("root", ["torch=.", "megatron-core=no/such/folder", "megatron-core"])
def test_a_wrong_root_is_a_usage_error(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_patches.main(["--root", root]) == 2
    assert root in capsys.readouterr().err


def test_anchors_match_at_line_starts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nimport triton\n")
    assert Anchor("a.py", "^import triton$").is_in(tmp_path)
    assert not Anchor("a.py", "^import trit$").is_in(tmp_path)


# --- ledger ---------------------------------------------------------------------------------------------------------------


def _ledger_rows() -> dict[str, list[str]]:
    """First cell of every table row of patches/README.md that names a patch -> all its cells."""
    rows = {}
    for text in (REPO / "patches" / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if text.startswith("| `"):
            rows[cells[0].strip("`")] = cells
    return rows


def test_the_ledger_lists_exactly_the_patches() -> None:
    assert set(_ledger_rows()) == {patch.name for patch in PATCHES}


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.dependency.distribution}:{patch.name}")
def test_a_ledger_row_names_file_versions_upstream_and_an_existing_test(patch: Patch) -> None:
    _, file, _, upstream, versions, removal, test = _ledger_rows()[patch.name]
    assert (REPO / "patches" / file.strip("`")).is_file()
    assert upstream.split()[0].strip("[]") in patch.upstream
    assert versions == ", ".join(patch.versions)
    assert removal
    test_file, _, function = test.strip("`").partition("::")
    assert f"def {function}(" in (REPO / "tests" / test_file).read_text()


# --- what of megatron_core needs no process of its own ----------------------------------------------------------------------


class _Config:
    params_dtype = torch.float32
    sequence_parallel = True
    layernorm_zero_centered_gamma = False


def test_rmsnorm_divides_by_the_root_mean_square() -> None:
    norm = RMSNorm(_Config(), 2, eps=0.0, persist_layer_norm=False)
    # mean square of (3, 4) is 12.5, its root 3.5355
    assert torch.allclose(norm(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / 12.5**0.5)
    assert norm.weight.sequence_parallel is True


def test_rmsnorm_refuses_zero_centered_weights() -> None:
    class ZeroCentered(_Config):
        layernorm_zero_centered_gamma = True

    with pytest.raises(ValueError, match="layernorm_zero_centered_gamma"):
        RMSNorm(ZeroCentered(), 2)


@pytest.fixture
def literals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The factories as after install(), for the length of a test."""
    for name in factories.FACTORIES:
        monkeypatch.setattr(torch, name, getattr(torch, name))
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.cuda)
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.pin_memory)
    factories.redirect_cuda_literals()


def _zeros(module: str) -> torch.Tensor:
    """torch.zeros(1, device="cuda") called by a module of that name."""
    scope = {"__name__": module, "torch": torch}
    exec('result = torch.zeros(1, device="cuda")', scope)
    result = scope["result"]
    assert isinstance(result, torch.Tensor)
    return result


@pytest.mark.skipif(torch.cuda.is_available(), reason="the redirection is for machines without CUDA")
@pytest.mark.usefixtures("literals")
def test_only_megatron_modules_are_redirected() -> None:
    assert _zeros("megatron.core.anything").device.type == "cpu"
    for module in ("megatron_rl.actor", "transformers.modeling_utils"):
        with pytest.raises(AssertionError, match="CUDA"):
            _zeros(module)


@pytest.mark.usefixtures("literals")
def test_wrapped_factories_still_obey_a_device_context_and_torchscript() -> None:
    # Both recognise torch's factories by identity. transformers loads models under torch.device("meta").
    with torch.device("meta"):
        devices = {getattr(torch, name)(2).device.type for name in ("zeros", "ones", "empty", "tensor")}
    assert devices == {"meta"}
    scripted = torch.jit.script(_script_me)
    assert scripted(torch.ones(2)).tolist() == [1.0, 1.0]


def _script_me(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(2) + x
