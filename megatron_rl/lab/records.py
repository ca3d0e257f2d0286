"""What the laboratory measures: tokens, the conditions they were scored under, and the files that hold them.

Arrays are flat over the positions of all trajectories. Position t holds input token t and predicts token t + 1, as everywhere in the
project: a trajectory of N tokens fills N - 1 positions. Log-probs are natural, of the distribution that was sampled from.

Legend: T positions of all trajectories, S trajectories, L MoE layers of the whole model in order of depth, K experts a token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..config import require
from ..files import write_json, write_whole

FORMAT = 1
"""Of measurement.json; a file of another format is refused."""
JSON_NAME = "measurement.json"

Replay = Literal["none", "R2", "R3"]
Precision = Literal["fp32", "bf16", "fp16"]
Statistics = dict[str, float]


@dataclass(frozen=True)
class TokenBatch:
    """What one engine setting sampled."""

    label_T: NDArray[np.int32]
    """Token t + 1 of the trajectory: the one predicted at t."""
    mask_T: NDArray[np.bool_]
    """True where the label was sampled; False where it belongs to the prompt."""
    offsets_S: NDArray[np.int64]
    """[S + 1] positions offsets_S[i] .. offsets_S[i + 1] belong to trajectory i."""
    first_S: NDArray[np.int32]
    """Token 0 of each trajectory, which is no position's label."""
    turn_T: NDArray[np.int32]
    """Turn of the label; -1 where mask_T is False."""
    mu_T: NDArray[np.float32]
    """Log-prob of the label as the engine said when it sampled it; 0 where mask_T is False."""
    version_T: NDArray[np.int32]
    """Weight version that sampled the label; -1 where mask_T is False."""
    reward_S: NDArray[np.float32]
    advantage_S: NDArray[np.float32]
    group_S: NDArray[np.int32]
    """Index of the prompt."""
    routes_TLK: NDArray[np.uint8] | NDArray[np.int16] | None = None
    """The engine's experts for input token t; None for a dense model."""

    def __post_init__(self) -> None:
        t, s = len(self.label_T), len(self.first_S)
        require(s > 0 and t > 0, "trajectories", s, "are none; a measurement needs at least one")
        for name, length in _lengths(self, t, s).items():
            require(
                len(getattr(self, name)) == length, name, len(getattr(self, name)), f"values where {length} belong; is the file damaged?"
            )
        ends = self.offsets_S
        whole = ends[0] == 0 and ends[-1] == t and bool((np.diff(ends) > 0).all())
        require(whole, "offsets_S", ends.tolist()[:8], f"do not divide {t} positions into trajectories; is the file damaged?")
        require(bool(np.isfinite(self.mu_T).all()), "mu_T", "not finite", "somewhere; the engine's weights may hold NaN")

    @property
    def trajectories(self) -> int:
        """S."""
        return len(self.first_S)

    @cached_property
    def sequence_T(self) -> NDArray[np.int64]:
        """Trajectory of each position."""
        return np.repeat(np.arange(self.trajectories), np.diff(self.offsets_S))

    @cached_property
    def lengths_S(self) -> NDArray[np.int64]:
        """Sampled tokens of each trajectory."""
        return np.add.reduceat(self.mask_T.astype(np.int64), self.offsets_S[:-1])

    def tokens(self, i: int) -> NDArray[np.int32]:
        """[N] all token ids of trajectory i, prompt and answer."""
        return np.concatenate([self.first_S[i : i + 1], self.label_T[self.offsets_S[i] : self.offsets_S[i + 1]]])

    def split(self, values_T: NDArray[Any]) -> list[NDArray[Any]]:
        """The values at the sampled tokens, one array a trajectory."""
        return [v[m] for v, m in zip(self._cut(values_T), self._cut(self.mask_T), strict=True)]

    def _cut(self, values_T: NDArray[Any]) -> list[NDArray[Any]]:
        return np.split(values_T, self.offsets_S[1:-1])


def otherwise(a_TLK: NDArray[Any], b_TLK: NDArray[Any]) -> NDArray[np.bool_]:
    """[T, L] whether two routings choose different sets of experts."""
    differs: NDArray[np.bool_] = (np.sort(a_TLK, axis=-1) != np.sort(b_TLK, axis=-1)).any(axis=-1)
    return differs


def _lengths(record: Any, t: int, s: int) -> dict[str, int]:
    """The length each array of a record must have, by the letter its name ends in; absent ones left out."""
    wanted = {}
    for f in dataclasses.fields(record):
        if getattr(record, f.name) is None:
            continue
        if f.name == "offsets_S":
            wanted[f.name] = s + 1
        elif f.name.endswith("_S"):
            wanted[f.name] = s
        elif f.name.endswith(("_T", "_TL", "_TLK")):
            wanted[f.name] = t
    return wanted


@dataclass(frozen=True)
class Condition:
    """How the trainer scored the tokens."""

    name: str
    replay: Replay
    """none: its routers chose. R2: it replayed what its own routers chose with the engine's weight version. R3: the engine's routes."""
    dtype: Precision
    layout: str
    """"one process", or as "tp2 ep2"."""
    lag: int = 0
    """How many weight versions the trainer was ahead of the engine."""
    replayed_layers: tuple[int, ...] | None = None
    """Depths among the MoE layers, from 0, at which routes were replayed; None for all. The others chose."""
    quantised: bool = False
    """Whether the trainer computed with the engine's fake-quantised weights instead of its own."""


@dataclass(frozen=True)
class Rescored:
    """What the trainer said of the tokens under one condition."""

    condition: Condition
    logp_T: NDArray[np.float32]
    """Log-prob of the label; 0 where the label was not sampled."""
    entropy_T: NDArray[np.float32] | None = None
    """Nats; 0 where the label was not sampled."""
    routes_TLK: NDArray[np.uint8] | NDArray[np.int16] | None = None
    """The experts this forward used."""
    margin_TL: NDArray[np.float32] | None = None
    """Log-score of the K-th expert less that of the (K+1)-th, in forwards whose routers chose."""
    noise_T: NDArray[np.float32] | None = None
    """Half the spread of log theta - log mu over the engine's candidates for the position, nats: the least e for which the two engines'
    logits can differ by at most e each. Exact where the candidates are the whole vocabulary, else a lower bound. 0 without candidates."""

    shift_T: NDArray[np.float32] | None = None
    """Mean |log router score now / with the engine's weight version| over layers and the experts chosen then (RSPO); where they differ."""


@dataclass(frozen=True)
class EngineSetting:
    """How an engine sampled."""

    name: str
    dtype: Precision
    quantisation: str | None = None
    """int8 or fp8: its weights went through that format and back; activations did not. None: the checkpoint's weights."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0


@dataclass(frozen=True)
class Sampled:
    """One engine setting: what it sampled, and what the trainer said of it."""

    engine: EngineSetting
    batch: TokenBatch
    rescored: Mapping[str, Rescored]
    """By the condition's name, in the order they were measured."""

    def __post_init__(self) -> None:
        for name, one in self.rescored.items():
            require(name == one.condition.name, "rescored", name, f"is stored under another name than {one.condition.name!r}")
            for key, length in _lengths(one, len(self.batch.label_T), self.batch.trajectories).items():
                found = len(getattr(one, key))
                require(found == length, f"{name}: {key}", found, f"values for {length} positions; is the file damaged?")

    def find(self, **wanted: Any) -> Rescored | None:
        """The first condition whose fields have these values."""
        return next((r for r in self.rescored.values() if all(getattr(r.condition, k) == v for k, v in wanted.items())), None)


@dataclass(frozen=True)
class Measurement:
    """Everything `megatron-rl lab measure` saw."""

    samples: Mapping[str, Sampled]
    """By the engine setting's name; the first is the main one."""
    floor: Mapping[str, Statistics] = field(default_factory=dict)
    """Zero-update floor, "<engine setting>/<what was repeated>" -> statistics of the log-ratio between two scorings by the same weights."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """model, machine, versions, command, seed, config: JSON values."""

    def __post_init__(self) -> None:
        require(len(self.samples) > 0, "samples", 0, "are none; measure with at least one engine setting")

    @property
    def main(self) -> Sampled:
        """The first engine setting."""
        return next(iter(self.samples.values()))

    def save(self, folder: str | Path) -> Path:
        """Writes <folder>/measurement.json and the arrays it names; an earlier measurement there stays whole until the new one is.

        Returns:
            The JSON file.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, NDArray[Any]] = {}
        samples = [_pack_sample(one, f"{i}", arrays) for i, one in enumerate(self.samples.values())]
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        data = target / f"measurement-{digest[:16]}.npz"
        write_whole(data, buffer.getvalue())
        index = {
            "format": FORMAT,
            "arrays": data.name,
            "sha256": digest,
            "samples": samples,
            "floor": dict(self.floor),
            "meta": dict(self.meta),
        }
        write_json(target / JSON_NAME, index)
        for old in target.glob("measurement-*.npz"):
            if old != data:
                old.unlink()
        return target / JSON_NAME

    @staticmethod
    def load(folder: str | Path) -> Measurement:
        """Reads what `save` wrote.

        Raises:
            ValueError: there is no measurement, it is of another format, or it is damaged.
        """
        file = Path(folder) / JSON_NAME
        require(file.is_file(), "measurement", str(folder), f"has no {JSON_NAME}; give the --out of `megatron-rl lab measure`")
        index = json.loads(file.read_text())
        require(
            index.get("format") == FORMAT, str(file), index.get("format"), f"is its format, and this program reads {FORMAT}; measure again"
        )
        data = file.with_name(index["arrays"])
        raw = data.read_bytes() if data.is_file() else b""
        require(
            hashlib.sha256(raw).hexdigest() == index["sha256"], str(data), len(raw), "bytes are not those that were written; measure again"
        )
        with np.load(io.BytesIO(raw)) as arrays:
            samples = [_unpack_sample(one, f"{i}", arrays) for i, one in enumerate(index["samples"])]
        return Measurement({one.engine.name: one for one in samples}, index["floor"], index["meta"])


def _arrays(record: Any, prefix: str, out: dict[str, NDArray[Any]]) -> None:
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if isinstance(value, np.ndarray):
            out[f"{prefix}/{f.name}"] = value


def _pack_sample(one: Sampled, prefix: str, out: dict[str, NDArray[Any]]) -> dict[str, Any]:
    _arrays(one.batch, f"{prefix}/batch", out)
    for j, scored in enumerate(one.rescored.values()):
        _arrays(scored, f"{prefix}/{j}", out)
    return {
        "engine": dataclasses.asdict(one.engine),
        "conditions": [dataclasses.asdict(scored.condition) for scored in one.rescored.values()],
    }


def _unpack_sample(raw: Mapping[str, Any], prefix: str, arrays: Mapping[str, NDArray[Any]]) -> Sampled:
    def fields_of(cls: type, place: str) -> dict[str, NDArray[Any]]:
        names = (f.name for f in dataclasses.fields(cls))
        return {name: arrays[f"{place}/{name}"] for name in names if f"{place}/{name}" in arrays}

    conditions = []
    for values in raw["conditions"]:
        layers = values.pop("replayed_layers")
        conditions.append(Condition(**values, replayed_layers=None if layers is None else tuple(layers)))
    return Sampled(
        EngineSetting(**raw["engine"]),
        TokenBatch(**fields_of(TokenBatch, f"{prefix}/batch")),
        {c.name: Rescored(c, **fields_of(Rescored, f"{prefix}/{j}")) for j, c in enumerate(conditions)},
    )
