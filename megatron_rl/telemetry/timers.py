"""Where the seconds go, by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Adds up wall-clock seconds by phase.

    A phase inside another one is taken out of the outer one, so the phases of a step never sum to more than the step.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        """`synchronize` (torch.cuda.synchronize, say) is called at both ends of a phase, or queued work falls to the next one."""
        self._synchronize = synchronize
        self._current: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the body, also when it raises."""
        self._wait()
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            self._wait()
            elapsed = time.perf_counter() - began
            own = elapsed - self._inner.pop()
            if self._inner:
                self._inner[-1] += elapsed
            self._current[phase] = self._current.get(phase, 0.0) + own
            self._totals[phase] = self._totals.get(phase, 0.0) + own

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last call, as {"seconds/<phase>": s}."""
        assert not self._inner, "a phase is still running"
        seconds = {f"seconds/{phase}": value for phase, value in self._current.items()}
        self._current = {}
        return seconds

    @property
    def totals(self) -> dict[str, float]:
        """Seconds by phase since the start, as {"<phase>": s}, longest first."""
        return dict(sorted(self._totals.items(), key=lambda item: -item[1]))

    def _wait(self) -> None:
        if self._synchronize is not None:
            self._synchronize()
