"""Ports that a server can listen on."""

from __future__ import annotations

import random
import socket
from itertools import islice

PORTS = range(20_000, 30_000)
"""Where free ports are looked for: below those that systems give to outgoing connections (from 32,768 on Linux). Whoever knocks on one of
those before the server listens may be given the very same port, is connected to itself, and the server finds its port in use."""


def refusal(host: str, port: int) -> str | None:
    """Why nobody can listen there now; None where one can."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as uvicorn does: a port in TIME_WAIT is free
        try:
            server.bind((host, port))
        except OSError as error:
            return str(error.strerror)
    return None


def free_ports(host: str, count: int) -> list[int]:
    """So many of `PORTS`, drawn at random; fewer where no more can be had."""
    drawn = random.SystemRandom().sample(PORTS, len(PORTS))
    return list(islice((port for port in drawn if refusal(host, port) is None), count))
