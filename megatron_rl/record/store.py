"""What a run recorded, to read: by step, whoever wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.files import write_json
from megatron_rl.record.files import SCHEMAS, Series, leader_folder, leaders, segment_paths
from megatron_rl.record.schema import VERSION, Answer, Score, read_answer, read_score
from megatron_rl.record.segment import Segment
from megatron_rl.routing.payloads import RouteKind, decode_one
from megatron_rl.types import Origin

FOLDER = "record"
"""Below the logging.dir of a run."""
ABOUT = "about.json"


@dataclass(frozen=True)
class About:
    """What a record is of."""

    config: Mapping[str, Any]
    """The run's whole configuration."""
    leaders: int
    """Data-parallel leaders, each of which wrote."""
    world_size: int
    facts: Mapping[str, Any]
    """The model's numbers, and the versions of the packages, for people."""

    def save(self, root: Path) -> None:
        """Writes root/about.json, whole or not at all."""
        root.mkdir(parents=True, exist_ok=True)
        write_json(root / ABOUT, {"version": VERSION} | vars(self))

    @staticmethod
    def load(root: Path) -> About:
        """Reads it back.

        Raises:
            ValueError: there is none, or it is of another version or damaged.
        """
        file = root / ABOUT
        if not file.is_file():
            raise ValueError(f"{root}: holds no record (no {ABOUT}); record one with record.enabled true")
        try:
            values = json.loads(file.read_text())
            version = values.pop("version")
            if version != VERSION:
                raise ValueError(f"a record of version {version}, and this program reads version {VERSION}")
            return About(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file}: cannot be read: {error}") from error


class Store:
    """A record, as far as it is whole at the time of opening; a run may still be writing to it.

    Raises:
        ValueError: the folder holds none, or a file is not what it should be.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.about = About.load(self.root)
        self._segments = {series: [*self._open(series)] for series in SCHEMAS}

    def _open(self, series: Series) -> Iterable[Segment]:
        for leader in leaders(self.root):
            for path in segment_paths(leader_folder(self.root, leader), series):
                yield Segment(path, SCHEMAS[series])

    @property
    def bytes(self) -> int:
        """On disk, without about.json."""
        return sum(s.bytes for segments in self._segments.values() for s in segments)

    @property
    def kind(self) -> RouteKind | None:
        """Of the routes; None without any."""
        return next((segment.kind for segment in self._segments["answers"] if segment.kind is not None), None)

    @cached_property
    def steps(self) -> list[int]:
        """Steps of which anything was recorded, ascending."""
        found = [s.steps for s in self._segments["answers"]]
        return np.unique(np.concatenate(found)).tolist() if found else []

    def __len__(self) -> int:
        """Answers."""
        return sum(len(s) for s in self._segments["answers"])

    def answers(self, step: int) -> list[Answer]:
        """Everything that was seen in a step, by origin. Empty where nothing was recorded.

        Raises:
            ValueError: a row is damaged.
        """
        return sorted((self._answer(*place) for place in self._rows("answers", step)), key=lambda a: (a.purpose == "buffer", a.origin))

    def scores(self, step: int) -> dict[Origin, Score]:
        """What the trainer said of them in that step, by origin.

        Raises:
            ValueError: a row is damaged.
        """
        found: dict[Origin, Score] = {}
        for segment, index in self._rows("scores", step):
            score = read_score(segment.row(index)[0])
            found[score.origin] = score.merged(found.get(score.origin))
        return found

    def sampled(self, step: int) -> list[Answer]:
        """Everything that was sampled in a step, by origin.

        Raises:
            ValueError: something of it is missing, or a row is damaged.
        """
        fresh = self._fresh(step)
        why = self._lacks(fresh)
        if why is not None:
            raise ValueError(f"{self.root}: step {step} cannot be replayed: {why}")
        return fresh

    def missing(self, step: int) -> str | None:
        """Why a step cannot be trained on again; None where everything is there that was sampled in it."""
        return self._lacks(self._fresh(step))

    def _fresh(self, step: int) -> list[Answer]:
        return [a for a in self.answers(step) if a.purpose != "buffer"]

    def _lacks(self, fresh: Sequence[Answer]) -> str | None:
        if not fresh:
            return "nothing of it was recorded, or it was dropped for record.max_gb"
        calls: dict[tuple[int, int], list[Answer]] = {}
        for answer in fresh:
            calls.setdefault((answer.origin.leader, answer.origin.call), []).append(answer)
        for (leader, call), found in calls.items():
            if len(found) != found[0].call_size:
                return f"of leader {leader}'s request {call} there are {len(found)} of {found[0].call_size} answers"
        silent = set(range(self.about.leaders)) - {leader for leader, _ in calls}
        return f"nothing of leaders {sorted(silent)} is there" if silent else None

    def _rows(self, series: Series, step: int) -> Iterable[tuple[Segment, int]]:
        for segment in self._segments[series]:
            for index in np.flatnonzero(segment.steps == step).tolist():
                yield segment, index

    @staticmethod
    def _answer(segment: Segment, index: int) -> Answer:
        row, payload = segment.row(index)
        if not row.column("routed")[0].as_py():
            return read_answer(row, None)
        if segment.kind is None:
            raise ValueError(f"{segment.path}: row {index} has routes, but the index says that there are none: a faulty writer")
        try:
            return read_answer(row, decode_one(payload, len(row.column("tokens")[0]) - 1, segment.kind))
        except ValueError as error:
            raise ValueError(f"{segment.path}: row {index}: {error}") from error
