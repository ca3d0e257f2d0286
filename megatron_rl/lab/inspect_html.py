"""A `Reading` as one HTML file that needs nothing else: the answer as coloured text, its prefix drift, and every token in a table."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from ..files import write_whole
from ..page.figure import NEUTRAL, Axis, Card, Column, Figure, Page, Section, Series, Table
from ..page.html import render
from ..page.numbers import number
from .colours import STRONGEST, hue, strength
from .inspect_terminal import experts
from .reading import Reading, Token

STYLE = Path(__file__).with_name("inspect.css")


def write_html(reading: Reading, file: Path) -> Path:
    """Writes the page, whole or not at all; returns `file`."""
    page = render(_page(reading))
    # The page's own sections hold figures and tables; the text stands before them, under the same style sheet.
    page = page.replace("</style>", STYLE.read_text(encoding="utf-8") + "</style>", 1).replace("</nav>", "</nav>" + _text(reading), 1)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, page)
    return file


def _page(reading: Reading) -> Page:
    answer = reading.answer
    t, origin = answer.trajectory, answer.origin
    sections = [Section("all", "Every sampled token", "Click a head to sort.", [_table(reading)])]
    if reading.gaps:
        sections.insert(0, Section("drift", "Drift along the answer", "", [_drift(reading)]))
    return Page(
        title=f"Answer {reading.number} of step {reading.step}",
        subtitle=f"{reading.run} · prompt {t.prompt.id} · leader {origin.leader}, request {origin.call}, place {origin.place}",
        cards=_cards(reading),
        sections=sections,
        facts={
            "purpose": answer.purpose,
            "group": t.group,
            "origin.step": origin.step,
            "finish_reason": t.finish_reason,
            "wanted answer": t.prompt.answer,
            "tokens": len(t.tokens),
            "sampled tokens": t.response_tokens,
            "weight versions": sorted({x.version for x in reading.tokens if x.role == "sampled"}),
            "routes": "none" if t.routes is None else f"{t.routes.shape[1]} layers, {t.routes.shape[2]} experts a token",
        },
    )


def _cards(reading: Reading) -> list[Card]:
    answer = reading.answer
    advantages = [t.advantage for t in reading.tokens if t.advantage is not None]
    trained = "not trained on" if answer.trained_reward is None else f"{number(answer.trained_reward)} after penalties"
    cards = [Card("Reward", number(answer.trajectory.reward), "" if answer.trained_reward == answer.trajectory.reward else trained)]
    if advantages:
        low, high = min(advantages), max(advantages)
        cards.append(Card("Advantage", number(low) if low == high else f"{number(low)} … {number(high)}"))
    if reading.gaps:
        cards += [
            Card("Mean k3", number(reading.k3), "of exp(d) − 1 − d, d = log old − log mu"),
            Card("Largest |d|", number(max(map(abs, reading.gaps))), f"token {reading.widest[0].index}, “{reading.widest[0].text}”"),
            Card("Log prefix ratio at the end", number(reading.drift[-1]), "sum of d over the answer"),
        ]
    if reading.flipped is not None:
        cards.append(
            Card("Tokens routed otherwise", f"{reading.flipped[0]} of {reading.flipped[1]}", "in at least one layer, without replay")
        )
    return cards


def _drift(reading: Reading) -> Figure:
    places = [t.index for t in reading.tokens if t.d is not None]
    note = "Log of the prefix's importance ratio, trainer over engine. A random walk comes back; a line that leaves is a drift."
    series = [
        Series("prefix, sum of d", places, reading.drift, "line", 0),
        Series("token, d", places, reading.gaps, "points", 1),
        Series("0", [places[0], places[-1]], [0.0, 0.0], "line", NEUTRAL, dashed=True),
    ]
    return Figure("prefix_drift", "Prefix drift", note, series, Axis("token", "integer"), Axis("nats"), wide=True)


def _table(reading: Reading) -> Table:
    columns = [
        Column("token", "integer", "Place in the trajectory, prompt included"),
        Column("text", "text"),
        Column("id", "integer"),
        Column("log mu", note="The engine's"),
        Column("log old", note="The trainer's, under the weights that started the step"),
        Column("d", note="log old - log mu"),
        Column("flips", "integer", "MoE layers the trainer would route otherwise; empty where nobody looked"),
        Column("advantage"),
        Column("turn", "integer"),
        Column("version", "integer", "Of the weights that sampled it"),
        Column("experts", "text", "The engine's, layers apart"),
    ]
    rows = [
        [t.index, t.text, t.id, t.mu, t.old, t.d, t.flips, t.advantage, t.turn, t.version, experts(t)]
        for t in reading.tokens
        if t.role == "sampled"
    ]
    note = f"{len(rows)} of {len(reading.tokens)} tokens; the others are the prompt or were put in by a tool."
    return Table("tokens", "Tokens", note, columns, rows)


def _text(reading: Reading) -> str:
    """The answer as it reads."""
    spans = "".join(_span(t) + ("<br>" if t.breaks else "") for t in reading.tokens)
    flips = '<span class="tok flip">underlined</span> routed otherwise in some layer' if reading.flipped is not None else ""
    return (
        '<section id="text"><div class="head"><h2>The answer</h2><p>The prompt is grey. Colour grows with the logarithm of |d|: blue where '
        "the trainer thinks a token less likely than the engine did, red where likelier. Rest the pointer on a token for its numbers.</p>"
        f'</div><div class="key">{_key()} {flips}</div><div class="answer">{spans}</div></section>'
    )


def _key() -> str:
    return "".join(f'<span class="tok{_strong(d)}" style="{_colour(d)}">{text}</span>' for d, text in _KEY)


_KEY: Sequence[tuple[float, str]] = ((-STRONGEST, "−1"), (-1e-2, "−0.01"), (0.0, "0"), (1e-2, "+0.01"), (STRONGEST, "+1"))


def _colour(d: float) -> str:
    return "background: rgb({} {} {} / {:.3f})".format(*hue(d), 0.85 * strength(d))


def _strong(d: float) -> str:
    """The class of grounds on which white reads better than ink, on the light page too."""
    return " strong" if strength(d) > 0.95 else ""


def _span(token: Token) -> str:
    if token.role != "sampled":
        return f'<span class="{token.role}">{html.escape(token.text)}</span>'
    parts = [f"token {token.index}, id {token.id}"]
    for name, value in (("log mu", token.mu), ("log old", token.old), ("d", token.d), ("advantage", token.advantage)):
        parts += [f"{name} {value:+.5f}"] if value is not None else []
    parts += [f"{token.flips} layers routed otherwise"] if token.flips is not None else []
    parts += [f"version {token.version}, turn {token.turn}"]
    parts += [f"experts {experts(token)}"] if token.experts else []
    style = "" if token.d is None else f' style="{_colour(token.d)}"'
    strong = "" if token.d is None else _strong(token.d)
    flip = " flip" if token.flips else ""
    title = html.escape("\n".join(parts), quote=True)
    return f'<span class="tok{flip}{strong}" tabindex="0"{style} title="{title}">{html.escape(token.text)}</span>'
