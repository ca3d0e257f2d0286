"""A `Reading` on a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from .colours import FAINTEST, STRONGEST, over, readable_on
from .reading import Reading, Token

GROUND = (24, 26, 30)
"""What faint tokens lie on, whatever the terminal's own is."""
MOST_LISTED = 10
WIDE = 110
"""Columns of a terminal from which on ids, versions and experts are shown too."""


def render(reading: Reading, console: Console) -> None:
    """Prints it."""
    console.print(Group(_head(reading), Text(""), _legend(reading), Text(""), _flow(reading), Text(""), *_widest(reading, console.width)))


def _head(reading: Reading) -> RenderableType:
    answer = reading.answer
    t = answer.trajectory
    rows = {
        "answer": f"{reading.number} of {reading.of} in step {reading.step}, {answer.purpose}; origin {_origin(reading)}",
        "prompt": f"{t.prompt.id}, wanted {t.prompt.answer!r}",
        "reward": _reward(reading),
        "tokens": f"{len(t.tokens)}, {t.response_tokens} sampled by weights {_versions(reading)}, ended by {t.finish_reason}",
        "mismatch": _mismatch(reading),
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _origin(reading: Reading) -> str:
    o = reading.answer.origin
    return f"step {o.step}, leader {o.leader}, request {o.call}, place {o.place}"


def _reward(reading: Reading) -> str:
    answer = reading.answer
    advantages = [t.advantage for t in reading.tokens if t.advantage is not None]
    text = f"{answer.trajectory.reward}"
    if answer.trained_reward is None:
        return text + ", not trained on"
    if answer.trained_reward != answer.trajectory.reward:
        text += f", {answer.trained_reward:g} after penalties"
    return text + ", advantage " + " .. ".join(f"{a:+.3f}" for a in sorted({min(advantages), max(advantages)})) if advantages else text


def _versions(reading: Reading) -> str:
    found = sorted({t.version for t in reading.tokens if t.role == "sampled"})
    return ", ".join(map(str, found)) or "none"


def _mismatch(reading: Reading) -> str:
    if not reading.gaps:
        return "no old log-probs were recorded"
    text = f"mean k3 {reading.k3:.2e}, largest |d| {max(map(abs, reading.gaps)):.4f}, log prefix ratio at the end {reading.drift[-1]:+.4f}"
    if reading.flipped is not None:
        text += f", {reading.flipped[0]} of {reading.flipped[1]} tokens routed otherwise"
    return text


def _legend(reading: Reading) -> Text:
    text = Text("d = old - mu  ")
    for d in (-STRONGEST, -1e-2, -FAINTEST, 1e-2, STRONGEST):
        text.append(f" {d:+g} ".replace("-0.0001", "  0  "), style=_ground(d))
    text.append("  blue: trainer thinks it less likely, red: likelier")
    if reading.flipped is not None:
        text.append("  ")
        text.append("underlined", style="underline")
        text.append(": routed otherwise")
    return text


def _ground(d: float) -> str:
    ground = over(d, GROUND)
    return "rgb({},{},{}) on rgb({},{},{})".format(*readable_on(ground), *ground)


def _style(token: Token) -> str:
    if token.role != "sampled":
        return "dim" if token.role == "prompt" else "dim italic"
    style = "bold" if token.d is None else _ground(token.d)
    return style + (" underline" if token.flips else "")


def _flow(reading: Reading) -> Text:
    flow = Text()
    for token in reading.tokens:
        flow.append(token.text, style=_style(token))
        if token.breaks:
            flow.append("\n")
    return flow


def _widest(reading: Reading, width: int) -> list[RenderableType]:
    """A table of the largest |d|; a narrow terminal gets fewer columns, not broken numbers."""
    listed = reading.widest[:MOST_LISTED]
    if not listed:
        return []
    table = Table(title=f"The {len(listed)} largest |d|", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    columns: dict[str, list[str | Text]] = {
        "token": [str(t.index) for t in listed],
        "text": [Text(t.text, style=_ground(t.d or 0.0)) for t in listed],
        "log mu": [f"{t.mu:.4f}" for t in listed],
        "log old": [f"{t.old:.4f}" for t in listed],
        "d": [f"{t.d:+.1e}" for t in listed],
        "flips": ["-" if t.flips is None else str(t.flips) for t in listed],
        "advantage": ["-" if t.advantage is None else f"{t.advantage:+.3f}" for t in listed],
    }
    if width >= WIDE:
        columns |= {"id": [str(t.id) for t in listed], "version": [str(t.version) for t in listed]}
        columns["engine's experts, by layer"] = [experts(t) for t in listed]
    for name in columns:
        is_text = name in ("text", "engine's experts, by layer")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return [table]


def experts(token: Token) -> str:
    """The engine's experts, layers apart."""
    return "  ".join("+".join(map(str, layer)) for layer in token.experts)
