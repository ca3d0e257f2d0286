"""The files of one leader: rows go to segments that are closed when they are large enough, and the oldest go when there are too many.

A leader writes to a folder of its own, so leaders share nothing. Segments of answers and of scores are numbered on their own:
`answers_000001`, `scores_000001`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from megatron_rl.record.schema import ANSWERS, SCORES
from megatron_rl.record.segment import Row, Segment, SegmentWriter, remove
from megatron_rl.routing.payloads import RouteKind

Series = Literal["answers", "scores"]
SCHEMAS: dict[Series, pa.Schema] = {"answers": ANSWERS, "scores": SCORES}
SEGMENT_BYTES = 64 * 2**20
"""Size at which a segment is closed, or an eighth of all that may be kept, if that is less."""


def leader_folder(root: Path, leader: int) -> Path:
    """Of the files of one leader."""
    return root / f"leader_{leader:05d}"


def leaders(root: Path) -> list[int]:
    """Who has written to a record."""
    return sorted(int(f.name.removeprefix("leader_")) for f in root.glob("leader_*") if f.is_dir())


def segment_paths(folder: Path, series: Series) -> list[Path]:
    """The segments of a series, oldest first, without suffix."""
    return sorted(f.with_suffix("") for f in folder.glob(f"{series}_*.index"))


@dataclass(frozen=True)
class _Closed:
    path: Path
    last_step: int
    bytes: int


class LeaderFiles:
    """Everything one leader writes.

    Args:
        folder: made if missing. What it holds of `first_step` and later is taken out: the run does those steps again.
        limit: bytes that all files of the folder may take. Whole segments of the oldest steps are removed before it would be passed.
        kind: of the answers' routes; None where none are kept.
    """

    def __init__(self, folder: Path, limit: int, kind: RouteKind | None, first_step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._limit, self._kind = folder, limit, kind
        self._open: dict[Series, SegmentWriter] = {}
        self._closed: list[_Closed] = []
        self._next: dict[Series, int] = {}
        for series in SCHEMAS:
            self._take_over(series, first_step)

    def _take_over(self, series: Series, first_step: int) -> None:
        paths = segment_paths(self._folder, series)
        for path in paths:
            segment = Segment(path, SCHEMAS[series])
            segment.cut(int((segment.steps < first_step).sum()))  # steps only rise
            if path.with_suffix(".index").exists():
                kept = Segment(path, SCHEMAS[series])
                self._closed.append(_Closed(path, int(kept.steps[-1]), kept.bytes))
        self._next[series] = max((int(re.sub(r"\D", "", path.name)) for path in paths), default=0) + 1

    @property
    def bytes(self) -> int:
        """On disk."""
        return sum(one.bytes for one in self._closed) + sum(one.bytes for one in self._open.values())

    def append(self, series: Series, rows: Sequence[Row]) -> None:
        """Writes rows, in order of steps."""
        largest = min(SEGMENT_BYTES, self._limit // 8)
        at = 0
        while at < len(rows):
            segment = self._writable(series, rows[at].bytes, largest)
            end, size = at + 1, segment.bytes + rows[at].bytes
            while end < len(rows) and size + rows[end].bytes <= largest:
                size += rows[end].bytes
                end += 1
            self._make_room(size - segment.bytes)
            segment.append(rows[at:end])
            at = end

    def _writable(self, series: Series, more: int, largest: int) -> SegmentWriter:
        """The open segment, or a new one where it is full."""
        segment = self._open.get(series)
        if segment is not None and segment.rows and segment.bytes + more > largest:
            segment.close()
            self._closed.append(_Closed(segment.path, segment.last_step, segment.bytes))
            segment = None
        if segment is None:
            path = self._folder / f"{series}_{self._next[series]:06d}"
            self._next[series] += 1
            segment = self._open[series] = SegmentWriter(path, SCHEMAS[series], self._kind if series == "answers" else None)
        return segment

    def _make_room(self, more: int) -> None:
        while self._closed and self.bytes + more > self._limit:
            oldest = min(self._closed, key=lambda one: (one.last_step, one.path.name))
            self._closed.remove(oldest)
            remove(oldest.path)

    def close(self) -> None:
        """Closes the open segments; nothing may be appended afterwards."""
        for segment in self._open.values():
            segment.close()
        self._open.clear()
