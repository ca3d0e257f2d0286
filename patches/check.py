"""Whether the sources of a dependency still look as its patches expect. Reads files; imports no dependency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .core import Dependency, Patch

Status = Literal["found", "missing", "untested", "not needed", "not installed"]


@dataclass(frozen=True)
class Report:
    """What was found for one patch."""

    dependency: str
    version: str | None
    """Version of the sources; None: not installed."""
    patch: str
    status: Status
    """found: every anchor is there. missing: at least one is not. untested: a version nobody ran the patches on (anchors are
    looked up all the same). not needed: the patch is for other tested versions."""
    missing: tuple[str, ...] = ()
    """`path: pattern` of each anchor that is not there."""

    @property
    def ok(self) -> bool:
        """Whether the patch may be applied, or need not be."""
        return self.status not in ("missing", "untested")


def check(patches: Iterable[Patch], roots: dict[str, Path] | None = None) -> list[Report]:
    """Look for the anchors of `patches`.

    Args:
        patches: of one or several dependencies.
        roots: distribution name -> package root to read instead of the installed one.

    Returns:
        One report a patch, in the order given.
    """
    patches = list(patches)
    tested: dict[str, set[str]] = {}
    for patch in patches:
        tested.setdefault(patch.dependency.distribution, set()).update(patch.versions)
    sources = {patch.dependency: _sources(patch.dependency, roots or {}) for patch in patches}
    return [_report(patch, sources[patch.dependency], tested[patch.dependency.distribution]) for patch in patches]


def _sources(dependency: Dependency, roots: dict[str, Path]) -> tuple[Path, str] | None:
    """Package root and version, or None where the dependency is not installed."""
    try:
        root = roots.get(dependency.distribution) or dependency.root()
    except ModuleNotFoundError:
        return None
    return root, dependency.version_at(root)


def _report(patch: Patch, sources: tuple[Path, str] | None, tested: set[str]) -> Report:
    distribution = patch.dependency.distribution
    if sources is None:
        return Report(distribution, None, patch.name, "not installed")
    root, version = sources
    if version in tested and version not in patch.versions:
        return Report(distribution, version, patch.name, "not needed")
    missing = tuple(f"{anchor.path}: {anchor.pattern}" for anchor in patch.anchors_for(version) if not anchor.is_in(root))
    status: Status = "untested" if version not in tested else "missing" if missing else "found"
    return Report(distribution, version, patch.name, status, missing)
