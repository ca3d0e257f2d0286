"""An event loop in a thread of its own, for synchronous callers that want connections to outlive a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any


class BackgroundLoop:
    """Runs coroutines in a daemon thread.

    A daemon, unlike anyio's blocking portal, because a thread that waits for work would keep the interpreter from ending, and with
    it the servers, when a caller forgets to close.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()

    def start(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Future[Any]:
        """Schedules `function(*args)`; the future can be waited for, or cancelled, from any thread."""

        async def call() -> Any:
            return await function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def close(self) -> None:
        """Ends the thread; work that is still running is dropped."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
