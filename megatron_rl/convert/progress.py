"""How far a conversion is: bytes done, bytes a second, time left. A bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Self

log = logging.getLogger(__name__)

LINE_SECONDS = 5.0


class Progress:
    """Counts one rank's bytes; only rank 0's are shown. Use it as a context manager.

    Args:
        what: stands before the numbers.
        total: bytes of this rank's share.
        shown: False keeps quiet.
    """

    def __init__(self, what: str, total: int, *, shown: bool = True) -> None:
        self.what, self.total, self.done = what, total, 0
        self._shown = shown
        self._start = self._line = time.monotonic()
        self._bar = _Bar(what, total) if shown and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def skip(self, count: int) -> None:
        """Bytes that an earlier run wrote: they count neither as done nor as left to do."""
        self.total -= count
        if self._bar is not None:
            self._bar.update(self.done, self.total)

    def add(self, count: int) -> None:
        """Bytes that were written."""
        self.done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self.done, self.total)
        elif self._shown and now - self._line >= LINE_SECONDS:
            self._line = now
            log.info("%s", self.line(now - self._start))

    def line(self, seconds: float) -> str:
        """The numbers after so many seconds, in words."""
        rate = self.done / seconds if seconds > 0 else 0.0
        left = f"{(self.total - self.done) / rate:.0f} s left" if rate else "time left unknown"
        return f"{self.what}: {_mib(self.done)} of {_mib(self.total)} MiB, {rate / 1e6:.0f} MB/s, {left}"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f}"


class _Bar:
    """rich's, on stderr."""

    def __init__(self, what: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Rich

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._rich = Rich(*columns, console=Console(stderr=True))
        self._task = self._rich.add_task(what, total=total)
        self._rich.start()

    def update(self, done: int, total: int) -> None:
        self._rich.update(self._task, completed=done, total=total)

    def stop(self) -> None:
        self._rich.stop()
