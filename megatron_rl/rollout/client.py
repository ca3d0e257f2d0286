"""One SGLang server over HTTP: requests, replies, and errors that name the server.

Written against SGLang 0.5.23. Only reads are repeated after a broken connection: a generation or a weight update that may have
happened is never sent twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson
import stamina

JSON_HEADERS = {"content-type": "application/json"}


class EngineError(RuntimeError):
    """A server refused a request, answered something impossible, or is gone. The message names its URL and what was asked."""


class EngineUnreachable(EngineError):
    """No answer came back: the connection could not be made, broke, or took too long."""


def open_session() -> aiohttp.ClientSession:
    """A session that keeps connections alive, without a limit of its own on how many.

    Connections idle for 3 s are not used again: uvicorn closes its side after 5 s, and a request on a half-closed connection
    cannot be told from one that was lost on the way.
    """
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


class EngineClient:
    """The HTTP calls of one server.

    Args:
        url: `http://host:port`.
        session: shared by the clients of a fleet; it belongs to the caller.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float, what: str | None = None
    ) -> Any:
        """Sends one request and returns the decoded JSON reply, None for an empty or a plain-text one.

        Args:
            body: sent as JSON; None sends no body.
            timeout: seconds for all of it.
            what: what was asked, for error messages; the method and path when None.

        Raises:
            EngineUnreachable: no reply.
            EngineError: a status other than 200; the message carries the server's own.
        """
        what = what or f"{method} {path}"
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._session.request(
                method, self.url + path, data=data, headers=JSON_HEADERS, timeout=aiohttp.ClientTimeout(total=timeout)
            ) as reply:
                status, raw = reply.status, await reply.read()
        except TimeoutError as error:
            raise EngineUnreachable(f"{self.url}: {what}: no answer within {timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"{self.url}: {what}: {type(error).__name__}: {error}") from error
        if status != 200:
            raise EngineError(f"{self.url}: {what}: HTTP {status}: {_message(raw)}")
        return _decode(raw)

    async def read(self, path: str, *, timeout: float = 20.0) -> Any:
        """A GET that changes nothing, so it is tried up to three times."""
        async for attempt in stamina.retry_context(on=EngineUnreachable, attempts=3, wait_initial=0.1, wait_max=1.0, timeout=timeout):
            with attempt:
                return await self.request("GET", path, timeout=timeout)
        raise AssertionError("stamina ends by returning or raising")

    async def model_info(self) -> dict[str, Any]:
        """What the server serves now, `weight_version` and `architectures` among it. Answers at once, also while paused."""
        return dict(await self.read("/model_info"))

    async def server_info(self) -> dict[str, Any]:
        """The arguments the server was started with, as it resolved them."""
        return dict(await self.read("/server_info"))

    async def vocab_size(self) -> int:
        """Rows of the model's vocabulary.

        No endpoint tells it, but the check of `logit_bias` does: it refuses an id out of range with a message that names the
        last valid one, before anything reaches the model.
        """
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(2**31 - 1): 0.0}}}
        try:
            await self.request("POST", "/generate", probe, timeout=20.0, what="asking for the vocabulary size")
        except EngineUnreachable:
            raise
        except EngineError as refusal:
            _, found, rest = str(refusal).partition("in [0, ")
            last = rest.partition("]")[0]
            if found and last.isdigit():
                return int(last) + 1
            raise
        raise EngineError(f"{self.url}: accepted a logit_bias for token {2**31 - 1}, so its vocabulary size cannot be asked")

    async def generate(self, body: Mapping[str, Any], *, timeout: float, what: str) -> list[dict[str, Any]]:
        """Samples; a request for one prompt and one for several both return a list.

        Raises:
            EngineError: as `request`, or the reply is no generation.
        """
        reply = await self.request("POST", "/generate", body, timeout=timeout, what=what)
        replies = reply if isinstance(reply, list) else [reply]
        for one in replies:
            if not isinstance(one, dict) or "meta_info" not in one or "output_ids" not in one:
                raise EngineError(f"{self.url}: {what}: the reply has no output_ids and meta_info: {str(one)[:300]}")
        return replies

    async def command(self, path: str, body: Mapping[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
        """A POST that changes the server's state; sent once.

        Raises:
            EngineError: as `request`, or a reply that says `success: false`.
        """
        reply = await self.request("POST", path, body, timeout=timeout)
        result = dict(reply) if isinstance(reply, dict) else {}
        if result.get("success") is False:
            raise EngineError(f"{self.url}: POST {path}: {result.get('message')}")
        return result


def _decode(raw: bytes) -> Any:
    """JSON where it is JSON; some of SGLang's commands answer in plain text, which carries nothing."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _message(raw: bytes) -> str:
    reply = _decode(raw)
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return raw.decode(errors="replace")[:500]
