"""What a weight update needs of the fleet, and the steps both ways of updating share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from megatron_rl.sync.checksums import Checksums


class FleetControl(Protocol):
    """The part of `rollout.fleet.Fleet` that weight updates use."""

    @property
    def urls(self) -> tuple[str, ...]: ...

    @property
    def tensor_sizes(self) -> tuple[int, ...]: ...

    @property
    def whole_on_cpu(self) -> bool: ...

    def command(self, path: str, bodies: Sequence[Any] | None = None, *, timeout: float) -> Future[list[dict[str, Any]]]: ...

    def versions(self) -> tuple[str, ...]: ...

    def quarantine(self, reason: str) -> None: ...


class WeightSync(Protocol):
    """Brings new weights into every server of a fleet. Lives on the one rank that talks to the fleet."""

    def push(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights.

        Args:
            weights: full tensors under their Hugging Face names; consumed once, in order.
            version: what the servers report from then on.

        Raises:
            WeightUpdateError: a step failed; the fleet refuses to sample from then on.
        """

    def close(self) -> None:
        """Ends what the updates kept open."""


class WeightUpdateError(RuntimeError):
    """An update failed. Some servers may hold a mixture of old and new weights."""


@contextmanager
def guarded(fleet: FleetControl, version: int) -> Iterator[Step]:
    """A weight update: whatever goes wrong inside quarantines the fleet and names the step it went wrong in."""
    step = Step()
    try:
        yield step
    except BaseException as error:
        reason = f"weight update to version {version} failed at step '{step.name}'"
        fleet.quarantine(reason)
        if isinstance(error, Exception):
            raise WeightUpdateError(f"{reason}: {error}") from error
        raise


class Step:
    """Where an update stands."""

    def __init__(self) -> None:
        self.name = "start"

    def __call__(self, name: str) -> None:
        self.name = name


def flush(fleet: FleetControl, timeout: float) -> None:
    """Empties the key-value caches, which hold the old weights' keys; waits up to `timeout` s for running requests to end."""
    fleet.command(f"/flush_cache?timeout={timeout:g}", timeout=timeout + 5).result()


def check_versions(fleet: FleetControl, version: int) -> None:
    """Raises RuntimeError unless every server reports `version`."""
    wrong = [f"{url} reports {found}" for url, found in zip(fleet.urls, fleet.versions(), strict=True) if found != str(version)]
    if wrong:
        raise RuntimeError(f"expected weight version {version}, but {', '.join(wrong)}")


def check_checksums(fleet: FleetControl, expected: Checksums, timeout: float) -> None:
    """Compares every tensor of every server with the trainer's; where those cannot be computed (see checksums.py: CUDA, tensor
    parallel servers), the servers with each other.

    Raises:
        RuntimeError: a tensor differs; names the server and the first such tensors.
    """
    replies = fleet.command("/weights_checker", [{"action": "checksum"}] * len(fleet.urls), timeout=timeout).result()
    if fleet.whole_on_cpu:
        for url, reply in zip(fleet.urls, replies, strict=True):
            difference = expected.difference(reply["ranks"][0]["checksums"])
            if difference:
                raise RuntimeError(f"{url}: {difference}")
        return
    first = [rank["checksums"] for rank in replies[0]["ranks"]]
    for url, reply in zip(fleet.urls, replies, strict=True):
        if [rank["checksums"] for rank in reply["ranks"]] != first:
            raise RuntimeError(f"{url}: holds other weights than {fleet.urls[0]}")
