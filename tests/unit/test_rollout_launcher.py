"""Ports, arguments and log tails of the launcher, without starting a server."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl import ports
from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.launcher import LocalServer, ServerSpec, _child_environment, choose_ports, server_arguments

SPEC = ServerSpec(model_path="m", routes=True, context_length=100, weight_version=7, seed=5)


def test_port_in_use_names_port_field_and_remedy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=rf"rollout.base_port: {port} cannot be used on 127.0.0.1: Address already in use; .*null"):
            choose_ports(RolloutConfig(base_port=port))


def test_free_ports_are_distinct_and_never_given_to_outgoing_connections() -> None:
    found = choose_ports(RolloutConfig(launch=5))
    assert len(set(found)) == 5
    assert set(found) <= set(ports.PORTS)
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if outgoing.exists():
        assert max(ports.PORTS) < int(outgoing.read_text().split()[0])


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free, taken = choose_ports(RolloutConfig(launch=2))
    monkeypatch.setattr(ports, "PORTS", [taken, free])
    with socket.socket() as other:
        other.bind(("127.0.0.1", taken))
        other.listen()
        assert choose_ports(RolloutConfig()) == [free]
        with pytest.raises(ValueError, match=r"rollout.host: nothing can listen on 127.0.0.1"):
            choose_ports(RolloutConfig(launch=2))


def test_servers_differ_in_seed_and_share_the_rest() -> None:
    first = server_arguments(RolloutConfig(), SPEC, 0, 1000, cuda=False)
    second = server_arguments(RolloutConfig(), SPEC, 1, 1000, cuda=False)
    assert [(a, b) for a, b in zip(first, second, strict=True) if a != b] == [("5", "6")]


def test_cpu_cache_holds_every_running_request() -> None:
    """128 running requests of 100 tokens, and the one slot each that SGLang allots for the next token."""
    arguments = server_arguments(RolloutConfig(max_running_requests=128), SPEC, 0, 1000, cuda=False)
    assert arguments[arguments.index("--max-total-tokens") + 1] == str(128 * 101)


def test_cuda_takes_gpus_in_turn() -> None:
    arguments = server_arguments(RolloutConfig(tensor=2), SPEC, 3, 1000, cuda=True)
    assert arguments[arguments.index("--base-gpu-id") + 1] == "6"
    assert "--device" not in arguments


def test_extra_arguments_win() -> None:
    """argparse takes the last of two equal options."""
    arguments = server_arguments(RolloutConfig(extra_args=("--dtype", "float16")), SPEC, 0, 1000, cuda=False)
    assert arguments[-2:] == ["--dtype", "float16"]


def test_server_is_no_rank_of_the_trainer() -> None:
    child = _child_environment({"RANK": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "PATH": "p"}, cuda=True)
    assert child == {"PATH": "p", "HF_HUB_OFFLINE": "1"}


def test_death_tells_exit_code_and_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "server_0.log"
    with log.open("wb") as output:
        code = "print(*range(100), sep='\\n'); raise SystemExit(3)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, start_new_session=True)
    process.wait()
    reason = LocalServer("http://h:1", log, process).died()
    assert reason is not None
    assert reason.startswith(f"http://h:1: the server ended (exit code 3); last lines of {log}:\n")
    assert reason.endswith("    98\n    99\n") and "    74\n" not in reason, "25 lines are shown"
