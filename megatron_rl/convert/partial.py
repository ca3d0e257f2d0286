"""A folder that appears only when it is whole, and of which an interrupted conversion keeps what it finished.

Everything is written to `.NAME.partial` beside the folder, one file after another, each under its name only once it is whole. The
partial folder says what it is made from; the same conversion of the same files goes on in it, any other starts afresh.
"""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)

ORIGIN = "origin.json"
WRITE_BACK_BYTES = 32 << 20
PIECE_BYTES = 256 << 10
"""Largest write. The page cache takes a longer one into blocks so large that a virtual machine must get them back from its host first."""
ALIGNMENT = 64
"""Values begin at multiples of it in a file, as in memory: some processors copy several times slower where both differ by less."""
JOURNAL = ".journal.json"
"""Ends the names of files that only help to go on."""


def source_files(folder: Path) -> dict[str, list[int]]:
    """Size and time of change (ns) of every file below a folder: what tells whether a source is still the same."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


@contextmanager
def appearing(out: Path, origin: Mapping[str, Any], *, is_main: bool, barrier: Callable[[], None]) -> Iterator[Path]:
    """Gives the partial folder to write to; at the end of the block it becomes `out`. Collective where there are several ranks.

    Args:
        out: must not exist.
        origin: in JSON's types; what the files depend on. Files of a partial folder of the same origin are kept.
        is_main: of all ranks, one prepares and renames.
        barrier: waits for all ranks.

    Raises:
        ValueError: `out` exists.
        RuntimeError: writing failed (no space left, a file too large, no permission); it says what was kept.
    """
    if out.exists():
        raise ValueError(f"out: {str(out)!r} exists already; remove it or choose another folder")
    partial = out.parent / f".{out.name}.partial"
    try:
        if is_main:
            _prepare(partial, origin)
        barrier()
        yield partial
        barrier()
        if is_main:
            _finish(partial, out)
        barrier()
    except OSError as error:
        raise RuntimeError(
            f"out: {str(out)!r} could not be written: {error.strerror or error}; the files that were finished are in {str(partial)!r}: "
            "make room and run the same command again to go on from there, or remove that folder"
        ) from error


def _prepare(partial: Path, origin: Mapping[str, Any]) -> None:
    file = partial / ORIGIN
    if file.is_file() and json.loads(file.read_text()) == origin:
        log.info("going on with the interrupted conversion in %s", partial)
        for leftover in partial.rglob("*.writing"):
            leftover.unlink()
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_json(file, origin)


def _finish(partial: Path, out: Path) -> None:
    for file in (partial / ORIGIN, *partial.rglob(f"*{JOURNAL}")):
        file.unlink()
    for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        sync(folder)
    partial.rename(out)
    sync(out.parent)


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A file under another name until the end of the block, when it has reached the disk."""
    writing = path.with_name(path.name + ".writing")
    with _Writing(io.FileIO(writing, "wb")) as file:
        try:
            yield file
        except RuntimeError as error:
            # torch.save closes its archive after a failed write, and what that raises hides why.
            if file.failure is not None:
                raise file.failure from error
            raise
        file.flush()
        os.fsync(file.fileno())
    writing.rename(path)


class _Writing(io.BufferedWriter):
    """Has the kernel begin with what was written, so that the sync at the end finds little left to do."""

    failure: OSError | None = None
    """The first that a write met."""
    _written = _told = 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        try:
            for start in range(0, len(view), PIECE_BYTES):
                super().write(view[start : start + PIECE_BYTES])
        except OSError as error:
            self.failure = self.failure or error
            raise
        self._written += len(view)
        if self._written - self._told >= WRITE_BACK_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fileno(), self._told, self._written - self._told, os.POSIX_FADV_DONTNEED)
            self._told = self._written
        return len(view)


def write_json(path: Path, value: Any) -> None:
    """As `whole_file`."""
    with whole_file(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
