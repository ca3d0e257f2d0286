"""The SGLang servers of a run: started or connected to, checked, addressed together, ended.

The training loop is synchronous and the fleet is not: its connections live in an event loop of their own, in a background thread,
so they stay open between steps and a weight broadcast in the main thread can overlap with the request
that announces it.
"""

from __future__ import annotations

import asyncio
import atexit
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_rl.config import ModelConfig, ModelFacts, RolloutConfig, read_model_facts
from megatron_rl.rollout.background import BackgroundLoop
from megatron_rl.rollout.checks import Served, check_served
from megatron_rl.rollout.client import EngineClient, EngineError, EngineUnreachable, open_session
from megatron_rl.rollout.launcher import LocalServer, ServerSpec, launch, stop_all, wait_until_ready
from megatron_rl.rollout.routes import RouteShape, read_route_shape

CONTEXT_MARGIN = 8
"""Tokens a server's context is longer than asked for: SGLang ends an answer two tokens before its context is full."""
DEATH_NOTICE = 5.0
"""Seconds between a broken connection and the end of the process that held it."""


@dataclass
class Engine:
    """One server of the fleet."""

    client: EngineClient
    server: LocalServer | None
    """None where somebody else started it."""
    tensor: int = 1
    """Its tensor-parallel ranks, as it says itself."""
    device: str = "cpu"
    """Where it computes, as it says itself."""
    in_flight: int = 0
    """Samples asked for and not answered."""

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return self.client.url


class Fleet:
    """n >= 1 servers of one model. Use `start` or `connect`, and `close` or a `with` block.

    Every call is synchronous and may be made from one thread at a time.
    """

    def __init__(self, config: RolloutConfig, model: ModelConfig, *, routes: bool) -> None:
        self.config = config
        self.model = model
        self.facts: ModelFacts = read_model_facts(model.path)
        self.route_shape: RouteShape | None = read_route_shape(model.path)
        self.routes = routes
        self.engines: list[Engine] = []
        self.router: EngineClient | None = None
        self._unusable: str | None = None
        self._closed = False
        self._loop = BackgroundLoop()
        self._session = self._loop.start(_open_session).result()
        atexit.register(self.close)

    @classmethod
    def start(
        cls,
        config: RolloutConfig,
        model: ModelConfig,
        *,
        routes: bool,
        log_dir: Path,
        context_length: int | None = None,
        version: int = 0,
        seed: int = 0,
    ) -> Fleet:
        """Launches `config.launch` local servers, or connects to `config.urls` if there are any.

        Args:
            routes: whether the servers must return routed experts.
            log_dir: gets server_<i>.log.
            context_length: tokens of the longest prompt and answer together; the model's own limit when None.
            version: weight version of the checkpoint that launched servers load.
            seed: of the samplers; server i gets seed + i.

        Raises:
            ValueError: a port is in use, or a server does not fit the model.
            EngineError: a server ended or did not answer in time; with its last log lines.
        """
        if config.urls:
            return cls.connect(config.urls, config, model, routes=routes, router=config.router)
        fleet = cls(config, model, routes=routes)
        try:
            longest = min((context_length or fleet.facts.max_positions) + CONTEXT_MARGIN, fleet.facts.max_positions)
            spec = ServerSpec(model.path, routes, longest, version, seed)
            for server in launch(config, spec, log_dir):
                fleet.engines.append(Engine(EngineClient(server.url, fleet._session), server))
            fleet.run(fleet._wait_and_check)
        except BaseException:
            fleet.close()
            raise
        return fleet

    @classmethod
    def connect(cls, urls: Sequence[str], config: RolloutConfig, model: ModelConfig, *, routes: bool, router: str | None = None) -> Fleet:
        """Uses servers that run already, and does not end them.

        Args:
            urls: each server itself: weight updates go there.
            router: an SGLang model gateway (smg) in front of them; generation then goes through it, one sample a request.

        Raises:
            ValueError: a server does not fit the model.
            EngineError: a server does not answer.
        """
        fleet = cls(config, model, routes=routes)
        try:
            fleet.engines = [Engine(EngineClient(url, fleet._session), None) for url in urls]
            fleet.router = EngineClient(router, fleet._session) if router else None
            fleet.run(fleet._wait_and_check)
        except BaseException:
            fleet.close()
            raise
        return fleet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the servers this fleet launched and closes its connections; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        stop_all([engine.server for engine in self.engines if engine.server is not None])
        self.run(self._session.close)
        self._loop.close()

    @property
    def urls(self) -> tuple[str, ...]:
        """One a server."""
        return tuple(engine.url for engine in self.engines)

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel ranks of each server."""
        return tuple(engine.tensor for engine in self.engines)

    @property
    def whole_on_cpu(self) -> bool:
        """Whether every server holds whole tensors on CPU, whose checksums are those of plain bytes."""
        return all(engine.device == "cpu" and engine.tensor == 1 for engine in self.engines)

    def run(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Awaits `function(*args)` in the fleet's event loop; Ctrl-C interrupts the wait and cancels it."""
        future = self.start_soon(function, *args)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def start_soon(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Future[Any]:
        """As `run`, without waiting."""
        return self._loop.start(function, *args)

    def versions(self) -> tuple[str, ...]:
        """The weight version each server reports."""
        return tuple(str(info["weight_version"]) for info in self.run(self._each_read, "/model_info"))

    def command(self, path: str, bodies: Sequence[Any] | None = None, *, timeout: float) -> Future[list[dict[str, Any]]]:
        """POSTs to every server at once; the future holds one reply a server, in order.

        Args:
            bodies: one JSON body a server; None sends none.

        Raises:
            EngineError: in the future, naming every server that refused, is gone or was too slow.
        """
        return self.start_soon(self._each_command, path, bodies or [None] * len(self.engines), timeout)

    def quarantine(self, reason: str) -> None:
        """Refuses to sample from here on: a server may hold half an update."""
        self._unusable = reason

    def require_usable(self) -> None:
        """Raises EngineError after `quarantine`."""
        if self._unusable is not None:
            raise EngineError(f"the fleet must not be sampled from: {self._unusable}; start it again")

    def poll_dead(self) -> str | None:
        """Why a launched server has ended, with its last log lines; None while all run."""
        reasons = [engine.server.died() for engine in self.engines if engine.server is not None]
        return next((reason for reason in reasons if reason is not None), None)

    async def explain(self, error: EngineUnreachable) -> EngineError:
        """The reason behind a lost connection: waits a little for a launched server to end, whose end then says more."""
        deadline = time.monotonic() + (DEATH_NOTICE if any(engine.server for engine in self.engines) else 0)
        while True:
            reason = self.poll_dead()
            if reason is not None:
                return EngineError(reason)
            if time.monotonic() >= deadline:
                return error
            await asyncio.sleep(0.1)

    async def _wait_and_check(self) -> None:
        for engine in self.engines:
            if engine.server is not None:
                await wait_until_ready(engine.server, engine.client, self.config.start_timeout)
        await asyncio.gather(*(self._check(engine) for engine in self.engines))

    async def _check(self, engine: Engine) -> None:
        client = engine.client
        server, model = await asyncio.gather(client.server_info(), client.model_info())
        served = Served(client.url, server, model, await client.vocab_size())
        config = self.config
        check_served(served, self.facts, self.route_shape, dtype=config.dtype, routes=self.routes, keep_sets=config.keep_sets)
        engine.tensor = int(server["tp_size"])
        engine.device = str(server["device"])

    async def _each_read(self, path: str) -> list[Any]:
        return await _all([engine.client.read(path) for engine in self.engines])

    async def _each_command(self, path: str, bodies: Sequence[Any], timeout: float) -> list[dict[str, Any]]:
        return await _all([self._command(engine, path, body, timeout) for engine, body in zip(self.engines, bodies, strict=True)])

    async def _command(self, engine: Engine, path: str, body: Any, timeout: float) -> dict[str, Any]:
        try:
            return await engine.client.command(path, body, timeout=timeout)
        except EngineUnreachable as error:
            raise await self.explain(error) from error


async def _open_session() -> Any:
    return open_session()


async def _all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Awaits all, then raises one EngineError that tells of every failure."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    if not failures:
        return results
    unexpected = next((failure for failure in failures if not isinstance(failure, EngineError)), None)
    if unexpected is not None:
        raise unexpected
    raise EngineError("; ".join(str(failure) for failure in failures)) from failures[0]


def serve(
    config: RolloutConfig,
    model: ModelConfig,
    *,
    routes: bool,
    log_dir: Path,
    announce: Callable[[str], None],
    context_length: int | None = None,
) -> None:
    """Launches a fleet, announces each URL once all servers answer, and waits until it is interrupted or a server ends.

    Raises:
        EngineError: a server ended; with its last log lines.
    """
    with Fleet.start(config, model, routes=routes, log_dir=log_dir, context_length=context_length) as fleet:
        for url in fleet.urls:
            announce(url)
        try:
            while (reason := fleet.poll_dead()) is None:
                time.sleep(0.5)
        except KeyboardInterrupt:
            return
        raise EngineError(reason)
