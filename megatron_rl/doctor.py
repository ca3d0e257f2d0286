"""`megatron-rl doctor`: what is installed, what would run, and the remedy for what is missing.

Everything is found out in the way a run would: Megatron is imported as the actor imports it, SGLang as its launcher does (in a process
of its own, because of the stand-ins a CPU needs).
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from .ports import free_ports, refusal

Status = Literal["ok", "note", "missing"]
PACKAGES = {
    "torch": "pip install 'torch>=2.8,<2.15'",
    "megatron-core": "pip install megatron-core==0.16.1",
    "sglang": "pip install --no-deps sglang==0.5.23 -r patches/requirements-sglang-cpu.txt",
    "transformers": "pip install 'transformers>=5.3,<6'",
    "megatron-rl-patches": "pip install ./patches",
    "jsonargparse": "pip install 'jsonargparse[signatures]'",
    "reasoning-gym": "pip install reasoning-gym",
    "numpy": "pip install numpy",
}
"""Distributions and what installs them; tools/install.sh installs all."""
GIB = 1 << 30
DISK_FLOOR = 5 * GIB
"""A quickstart writes about 1 GiB; a checkpoint of a real model is far larger."""
MEMORY_FLOOR = 3 * GIB
"""Two trainer ranks and one server of the quickstart."""
RENDEZVOUS_PORT = 29500
"""torchrun's default."""
ENGINE_PROBE = """
import json
from megatron_rl_patches.sglang import launch_server
launch_server.prepare_process()
launch_server.check_plugin()
from sglang.launch_server import run_server
from sglang.srt.plugins import load_plugins
load_plugins()
from megatron_rl_patches.core import active
print("ACTIVE " + json.dumps([patch.name for patch in active()]))
"""
ENGINE_TIMEOUT = 240.0
"""Seconds; the import takes about 15 CPU-seconds."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    area: str
    name: str
    value: str
    status: Status = "ok"
    remedy: str = ""


@dataclass(frozen=True)
class PatchState:
    """One change to a dependency, here and now."""

    dependency: str
    name: str
    state: str
    """active, unused (with CUDA), not applied, or what `tools/check_patches.py` says against it."""
    reason: str


@dataclass(frozen=True)
class Diagnosis:
    """All of it."""

    checks: tuple[Check, ...]
    patches: tuple[PatchState, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is missing."""
        return all(check.status != "missing" for check in self.checks)

    def as_json(self) -> str:
        """One object: ok, checks, patches."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=1)


def diagnose(*, engine: bool = True) -> Diagnosis:
    """Looks at everything; `engine` says whether to import SGLang too."""
    checks = [*_versions(), *_machine()]
    if importlib.util.find_spec("torch") is None:
        return Diagnosis(tuple(checks), ())
    checks += [*_devices(), *_threads()]
    if importlib.util.find_spec("megatron_rl_patches") is None:
        return Diagnosis(tuple(checks), ())
    checks.append(_layers())
    engine_check, in_engine = _engine() if engine else (Check("engine", "sglang", "not tried (--no-engine)", "note"), ())
    checks.append(engine_check)
    patches = _patches(in_engine)
    checks += _broken(patches)
    return Diagnosis(tuple(checks), patches)


def _versions() -> Iterator[Check]:
    yield Check("versions", "python", platform.python_version())
    for name, remedy in PACKAGES.items():
        try:
            yield Check("versions", name, version(name))
        except PackageNotFoundError:
            yield _not_installed(name, remedy)


def _not_installed(name: str, remedy: str) -> Check:
    if name == "sglang" and _has_cuda():
        return Check("versions", name, "not in this environment", "note", "with CUDA servers live in another one: set rollout.urls")
    return Check("versions", name, "not installed", "missing", f"{remedy} (tools/install.sh installs everything)")


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _machine() -> Iterator[Check]:
    free = shutil.disk_usage(Path.cwd()).free
    yield _at_least("disk", f"free in {Path.cwd()}", free, DISK_FLOOR, "free some space, or run where there is some")
    memory = _available_memory()
    if memory is not None:
        yield _at_least("memory", "available", memory, MEMORY_FLOOR, "end something, or use a larger machine")
    if refusal("127.0.0.1", RENDEZVOUS_PORT) is None:
        yield Check("ports", "torchrun's", f"{RENDEZVOUS_PORT} free")
    else:
        yield Check("ports", "torchrun's", f"{RENDEZVOUS_PORT} in use", "note", "give torchrun another --master-port, or --standalone")
    ports = free_ports("127.0.0.1", 3)
    if ports:
        yield Check("ports", "for servers", f"free, e.g. {', '.join(map(str, ports))}")
    else:
        yield Check("ports", "for servers", "none", "missing", "this machine lets nobody listen on 127.0.0.1; allow it")


def _at_least(area: str, name: str, value: int, floor: int, remedy: str) -> Check:
    if value >= floor:
        return Check(area, name, f"{value / GIB:.1f} GiB")
    return Check(area, name, f"{value / GIB:.1f} GiB, less than {floor / GIB:.0f}", "missing", remedy)


def _available_memory() -> int | None:
    """Bytes; None where /proc does not say (not Linux)."""
    table = Path("/proc/meminfo")
    if not table.is_file():
        return None
    values = dict(line.split(":") for line in table.read_text().splitlines())
    return int(values["MemAvailable"].split()[0]) * 1024


def _devices() -> Iterator[Check]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("devices", "cpu", f"{cores} cores, {platform.machine()}")
    if not torch.cuda.is_available():
        yield Check("devices", "cuda", "none: gloo, local layers and CPU patches are used")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Check("devices", f"cuda:{index}", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB")


def _threads() -> Iterator[Check]:
    import torch

    threads = torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS")
    found = f"{threads} a process, OMP_NUM_THREADS {setting or 'not set'}"
    if setting or torch.cuda.is_available():
        yield Check("threads", "torch", found)
    else:
        yield Check("threads", "torch", found, "note", "set OMP_NUM_THREADS=1: ranks and servers share the cores (torchrun does so itself)")


def _layers() -> Check:
    """Imports Megatron as the actor does, patches included."""
    try:
        from .actor.model import detect_implementation

        return Check("actor", "layers", str(detect_implementation()))
    except (ImportError, RuntimeError) as error:
        return Check("actor", "layers", f"Megatron does not import: {error}", "missing", f"{PACKAGES['megatron-core']}, or see the message")


def _engine() -> tuple[Check, tuple[str, ...]]:
    """Imports SGLang's server in a process of its own; also returns the patches that were on there."""
    if importlib.util.find_spec("sglang") is None:
        return Check("engine", "sglang", "not installed here", "note"), ()
    try:
        done = subprocess.run(
            [sys.executable, "-c", ENGINE_PROBE], capture_output=True, text=True, timeout=ENGINE_TIMEOUT, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Check("engine", "sglang", f"import took over {ENGINE_TIMEOUT:.0f} s", "missing", "try again on an idle machine"), ()
    lines = [line.removeprefix("ACTIVE ") for line in done.stdout.splitlines() if line.startswith("ACTIVE ")]
    if done.returncode == 0 and lines:
        return Check("engine", "sglang", "its server imports and would start"), tuple(json.loads(lines[-1]))
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return Check("engine", "sglang", f"its server does not import: {last[:300]}", "missing", PACKAGES["sglang"]), ()


def _patches(in_engine: tuple[str, ...]) -> tuple[PatchState, ...]:
    from megatron_rl_patches import megatron_core
    from megatron_rl_patches.check import check
    from megatron_rl_patches.core import active
    from megatron_rl_patches.sglang import ledger

    on = {patch.name for patch in active()} | set(in_engine)
    patches = (*megatron_core.PATCHES, *ledger.PATCHES)
    states = []
    for patch, found in zip(patches, check(patches), strict=True):
        if patch.name in on:
            state = "active"
        elif found.status != "found":
            state = found.status
        elif _has_cuda() and patch.cpu_only:
            state = "unused: there is CUDA"
        else:
            state = "used by layer specs" if patch.apply is None else "not applied: its dependency was not imported"
        states.append(PatchState(found.dependency, patch.name, state, patch.reason))
    return tuple(states)


def _broken(patches: tuple[PatchState, ...]) -> Iterator[Check]:
    """Patches that do not fit what is installed."""
    for patch in patches:
        if patch.state in ("missing", "untested") and not _has_cuda():
            remedy = f"install a version of {patch.dependency} that patches/README.md names, or see python tools/check_patches.py"
            yield Check("patches", patch.name, patch.state, "missing", remedy)


def render(diagnosis: Diagnosis) -> None:
    """Two tables, then what is to be done."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}
    checks = Table("area", "what", "found", "", box=None, header_style="bold")
    for check in diagnosis.checks:
        checks.add_row(check.area, check.name, check.value, marks[check.status])
    console.print(checks)
    patches = Table("patch", "of", "state", "why", box=None, header_style="bold", title_justify="left")
    for patch in diagnosis.patches:
        patches.add_row(patch.name, patch.dependency, patch.state, patch.reason)
    if diagnosis.patches:
        console.print()
        console.print(patches)
    console.print()
    for check in diagnosis.checks:
        if check.remedy:
            console.print(f"{marks[check.status]} {check.name}: {check.remedy}", highlight=False)
    console.print("nothing is missing" if diagnosis.ok else "[red]something is missing[/]; see above")
