"""What a patch is, when it may be applied, and which ones are on.

A `Patch` is data (why, upstream, tested versions, when it may go, the source lines it relies on) plus one function. `apply_patch`
is the only place that runs that function, so the guards (tested version, no CUDA for the CPU-only ones, once a process) hold for all.
Importing this module imports neither torch nor any patched dependency: `tools/check_patches.py` reads sources only.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Dependency:
    """A distribution that is patched, and where its version stands in its sources.

    The version is read from the files that will be imported, not from the installed metadata: a checkout that comes first on
    PYTHONPATH has no metadata, and the metadata of another copy would name the wrong version.
    """

    distribution: str
    """Name on the package index, e.g. "megatron-core"."""
    package: str
    """Import name of the package that anchors are relative to, e.g. "megatron.core"."""
    version_file: str
    """File with the version, relative to the package root."""
    version_pattern: str
    """Regular expression over that file; its groups joined by "." are the version."""

    def root(self) -> Path:
        """Folder of the installed package; of a dotted name, only the parents are imported.

        Raises:
            ModuleNotFoundError: the distribution is not installed.
        """
        parent = self.package.rpartition(".")[0]
        spec = importlib.util.find_spec(self.package) if not parent or importlib.util.find_spec(parent) else None
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(f"{self.distribution} is not installed (no package {self.package}): pip install {self.distribution}")
        return Path(spec.origin).parent

    def version_at(self, root: Path) -> str:
        """Version of the sources under `root`.

        Raises:
            ValueError: the version file does not look as expected.
        """
        path = root / self.version_file
        found = re.search(self.version_pattern, path.read_text())
        if found is None:
            raise ValueError(f"{path} does not state a version as {self.distribution} does (no match for {self.version_pattern!r})")
        return ".".join(found.groups())

    def installed_version(self) -> str:
        """Version of the sources that `import` would take."""
        return self.version_at(self.root())


@dataclass(frozen=True)
class Anchor:
    """Source text a patch relies on. When it is gone, the patch has nothing to hold on to (or is no longer needed)."""

    path: str
    """File relative to the dependency's package root."""
    pattern: str
    """Regular expression, multi-line mode (`^` and `$` match at lines)."""
    versions: tuple[str, ...] = ()
    """Versions this anchor is for; empty: every version of its patch."""

    def is_in(self, root: Path) -> bool:
        """Whether the sources under `root` have this text."""
        path = root / self.path
        return path.is_file() and re.search(self.pattern, path.read_text(), re.MULTILINE) is not None


@dataclass(frozen=True)
class Patch:
    """One change to a dependency. Fields are the columns of the ledger."""

    name: str
    """Unique within its dependency, e.g. "rng-state"."""
    dependency: Dependency
    reason: str
    """What is wrong without it, in a sentence."""
    upstream: str
    """Link text such as "NVIDIA/Megatron-LM#6891", or "none"."""
    versions: tuple[str, ...]
    """Versions of the dependency it was tested on."""
    removal: str
    """Condition under which it may go."""
    anchors: tuple[Anchor, ...]
    apply: Callable[[], None] | None
    """Makes the change; called at most once a process. None: a subclass that a spec names, nothing is replaced."""
    cpu_only: bool = True
    """Must not be applied where CUDA is present."""

    def applies_to(self, version: str) -> bool:
        """Whether it was tested on `version`."""
        return version in self.versions

    def anchors_for(self, version: str) -> tuple[Anchor, ...]:
        """The anchors that sources of `version` must have."""
        return tuple(anchor for anchor in self.anchors if not anchor.versions or version in anchor.versions)


# Replaced functions are a fact about the process, so the record of them is one too. Nothing reads it to decide anything
# but "was this already done?".
_active: dict[tuple[str, str], Patch] = {}


def active() -> tuple[Patch, ...]:
    """The patches that are on in this process, in the order they were applied."""
    return tuple(_active.values())


def is_active(patch: Patch) -> bool:
    """Whether `patch` is on in this process."""
    return (patch.dependency.distribution, patch.name) in _active


def check_version(dependency: Dependency, tested: tuple[str, ...], what: str) -> str:
    """The installed version of `dependency`, if it is one of `tested`.

    Raises:
        RuntimeError: it is not; the message names both and the remedy.
    """
    installed = dependency.installed_version()
    if installed not in tested:
        raise RuntimeError(
            f"{what} was tested on {dependency.distribution} {', '.join(tested)}, but {installed} is installed at {dependency.root()}. "
            f"Install a tested version (pip install {dependency.distribution}=={tested[0]}), or run tools/check_patches.py and the tests "
            f"of the patches against {installed} and add it to the versions in patches/."
        )
    return installed


def apply_patch(patch: Patch) -> None:
    """Apply `patch` if it is not on yet.

    Raises:
        RuntimeError: the installed version was not tested, or the patch is for machines without CUDA and there is CUDA.
    """
    assert patch.apply is not None, f"{patch.name} replaces nothing; name it in the layer spec"
    if is_active(patch):
        return
    check_version(patch.dependency, patch.versions, f"patch {patch.name!r}")
    if patch.cpu_only and _has_cuda():
        raise RuntimeError(
            f"patch {patch.name!r} of {patch.dependency.distribution} is for machines without CUDA and would send GPU work to the CPU; "
            "this machine has CUDA. Do not apply it here (install() leaves it out by itself)."
        )
    patch.apply()
    _active[patch.dependency.distribution, patch.name] = patch


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
