"""Numbers of a run, one JSON object a line and, if wanted, TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class MetricWriter:
    """Appends to `<folder>/metrics.jsonl` and `<folder>/tensorboard/`.

    A line is {"step": int, "time": seconds of running so far, "<name>": number, ...}; a number that is not finite is null. Each
    line is handed to the system as soon as it is written, so a crash loses nothing but, at worst, the end of the last line, which
    the next run drops. Only the rank that shows the run makes one.
    """

    def __init__(self, folder: str | Path, *, tensorboard: bool = True, resume_step: int | None = None) -> None:
        """Opens the files.

        Args:
            folder: made if missing.
            tensorboard: whether to write TensorBoard events too.
            resume_step: the last step of the checkpoint that the run continues from: later lines are dropped, and time goes on
                from the last line kept. None starts anew; an older run's file in this folder is replaced.

        Raises:
            ValueError: TensorBoard is wanted and its package is missing.
        """
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        self.path = root / METRICS_FILE
        kept = _keep_until(self.path, resume_step)
        self._began = time.monotonic() - max((row["time"] for row in kept), default=0.0)
        self._file = self.path.open("a", encoding="utf-8")
        self._board = _summary_writer(root / TENSORBOARD_FOLDER, resume_step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one line; names such as "reward/mean" group curves in TensorBoard by what stands before the slash."""
        clash = {"step", "time"} & values.keys()
        assert not clash, f"{clash} are the line's own fields"
        numbers = {name: float(value) for name, value in values.items()}
        self._file.write(_line({"step": step, "time": round(time.monotonic() - self._began, 3), **numbers}))
        self._file.flush()
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()

    def close(self) -> None:
        """Closes the files; a second call does nothing."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of `<folder>/metrics.jsonl` in order; null reads as NaN, and a last line that a crash cut short is left out.

    Raises:
        ValueError: the file is missing or a line other than the last is broken.
    """
    path = Path(folder) / METRICS_FILE
    if not path.is_file():
        raise ValueError(f"{path}: no such file; give the logging.dir of a run")
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                logger.warning("%s:%d was cut short and is left out", path, number)
                break
            raise ValueError(f"{path}:{number}: not JSON ({error}); remove the line") from error
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def _line(row: Mapping[str, float]) -> str:
    """One line of the file; JSON has no NaN and no infinity."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()}, allow_nan=False) + "\n"


def _keep_until(path: Path, resume_step: int | None) -> list[dict[str, Any]]:
    """Rewrites the file in one stroke with the rows up to `resume_step` and returns them."""
    kept = []
    if resume_step is not None and path.is_file():
        kept = [row for row in read_metrics(path.parent) if row["step"] <= resume_step]
    draft = path.with_suffix(".jsonl.tmp")
    with draft.open("w", encoding="utf-8") as file:
        for row in kept:
            file.write(_line(row))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return kept


def _summary_writer(folder: Path, resume_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise ValueError(
            f"logging.tensorboard: True needs the tensorboard package ({missing}); pip install 'tensorboard>=2.16' or set it to false"
        ) from missing
    if resume_step is None:
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        return SummaryWriter(str(folder))
    return SummaryWriter(str(folder), purge_step=resume_step + 1)
