"""Imports go one way: types, config <- methods, routing, page <- data, rewards, rollout, actor, sync, telemetry ... <- run, loop <- cli."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_rl"
LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"types", "config", "fields", "files", "machine", "ports"}),
    frozenset({"methods", "routing", "page"}),
    frozenset({"data", "record", "rewards", "rollout", "actor", "sync", "convert", "telemetry"}),
    frozenset({"source"}),
    frozenset({"run"}),
    frozenset({"opening"}),
    frozenset({"experience"}),
    frozenset({"stages", "probe"}),
    frozenset({"lab"}),
    frozenset({"loop"}),
    frozenset({"command_line", "preflight", "listing", "doctor", "subcommands"}),
    frozenset({"convert_cli"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
"""Rooms and top-level modules, lowest first; each imports lower ones only, and itself. A room's `cli` belongs to `cli`."""
SIDEWAYS = {
    ("preflight", "command_line"): "raises its UserError",
    ("actor.base", "convert"): "loads Hugging Face weights",
    ("actor.actor", "convert"): "exports Hugging Face weights",
    ("actor.critic", "convert"): "names the family it is built from",
    ("actor.model", "convert"): "takes TransformerConfig arguments from the family's table",
    ("actor.balance", "data"): "knows what a sequence costs",
    ("actor.feed", "data"): "packs the leader's batch",
    ("sync.disk", "convert"): "writes the folder that servers load",
    ("convert.session", "actor"): "conversions need the process groups of a layout, and find checkpoints",
    ("convert.skeleton", "actor"): "asks the model that training builds what a checkpoint of it holds",
    ("convert.commands", "actor"): "writes the state beside the weights, as training's checkpoints have it",
    ("convert.reshard", "actor"): "Megatron alone brings optimizer state to another layout",
    ("convert.mcore_inspection", "actor"): "reads the state beside the weights",
    ("convert.forward", "actor"): "computes logits with the model that training builds",
    ("convert.sides", "actor"): "hands on the process groups",
    ("convert.verify", "data"): "prompts are JSON lines, and the model's tokenizer reads them",
}
"""Imports within one level, by importing module and imported room; each with its reason."""
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[str]:
    """Absolute names that a module imports anywhere, in functions and for type checkers too; `from a import b` gives a and a.b."""
    parts = ["megatron_rl", *module.split(".")] if module else ["megatron_rl"]
    package = parts if is_package else parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What a module of megatron_rl imports although it must not."""
    room, found = "cli" if module.endswith(".cli") else module.split(".")[0], []
    for name in sorted(set(imports(source, module, is_package=is_package))):
        parts = name.split(".")
        if parts[0] == "megatron_rl" and len(parts) > 1 and parts[1] in LEVEL_OF:
            other = parts[1]
            sideways = LEVEL_OF[other] == LEVEL_OF[room] and (module, other) in SIDEWAYS
            if other != room and LEVEL_OF[other] >= LEVEL_OF[room] and not sideways:
                found.append(f"{module} imports {name}: {other} does not stand below {room}")
        if room == "methods" and (parts[0] == "megatron" or parts[:2] == ["torch", "distributed"]):
            found.append(f"{module} imports {name}: methods are pure")
    return found


def modules() -> list[tuple[str, Path]]:
    """Every module of the package, as a name relative to it."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return [(name, path) for name, path in found if name]


def test_every_module_has_a_level() -> None:
    rooms = {name.split(".")[0] for name, _ in modules()}
    assert rooms == set(LEVEL_OF), "a new room needs a level in this test and a line in docs/architecture.md"


def test_imports_go_one_way() -> None:
    found = [v for name, path in modules() for v in violations(path.read_text(), name, is_package=path.name == "__init__.py")]
    assert not found, "\n".join(found)


def test_every_sideways_import_is_still_used() -> None:
    used = {
        (name, imported.split(".")[1])
        for name, path in modules()
        for imported in imports(path.read_text(), name)
        if imported.startswith("megatron_rl.") and (name, imported.split(".")[1]) in SIDEWAYS
    }
    assert used == set(SIDEWAYS)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("actor.step", "from ..rollout.client import EngineClient"),
        ("rollout.client", "def f():\n    from megatron_rl.actor.model import DTYPES"),
        ("config", "from .methods import registry"),
        ("methods.tis", "import torch.distributed as dist"),
        ("methods.tis", "from torch import distributed"),
        ("methods.tis", "import megatron.core"),
        ("methods.tis", "from ..loop import train"),
        ("data.prompts", "if TYPE_CHECKING:\n    from ..cli import main"),
        ("data.prompts", "from .. import loop"),
    ],
)
def test_a_violation_is_seen(module: str, source: str) -> None:
    assert violations(source, module)


def test_the_architecture_page_lists_every_module() -> None:
    from tools.module_map import PAGE, section

    assert PAGE.read_text().endswith(section()), "run: python tools/module_map.py"
