"""One recorded answer, token by token: what each token reads as, and what engine and trainer said of it. Pure, for `lab inspect`."""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..record.schema import Answer, Score
from ..record.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Role = Literal["prompt", "given", "sampled"]
"""Part of the prompt; put in between, as a tool's output is; sampled by the policy."""


@dataclass(frozen=True)
class Token:
    """One token of an answer."""

    index: int
    """In the trajectory, prompt included."""
    id: int
    text: str
    """Every character visible: ↵ for a line break, · for a space, \\xe2 for a byte that is no character by itself."""
    breaks: bool
    """Whether a line ends in it."""
    role: Role
    turn: int
    version: int
    advantage: float | None
    mu: float | None
    """log-prob of the engine."""
    old: float | None
    """log-prob of the trainer, under the weights that started the step."""
    flips: int | None
    """MoE layers in which the trainer would send the token before elsewhere than the engine did; None where nobody looked."""
    experts: tuple[tuple[int, ...], ...]
    """The engine's, a layer each, of the token before: the row that this token was predicted from. Empty without routes."""

    @property
    def d(self) -> float | None:
        """old - mu: above 0 the trainer thinks the token likelier than the engine did."""
        return None if self.mu is None or self.old is None else self.old - self.mu


@dataclass(frozen=True)
class Reading:
    """One answer and what is known of it."""

    run: str
    step: int
    number: int
    """Which of the step's answers."""
    of: int
    answer: Answer
    tokens: tuple[Token, ...]

    @cached_property
    def gaps(self) -> list[float]:
        """d of every token that has one."""
        return [t.d for t in self.tokens if t.d is not None]

    @property
    def k3(self) -> float | None:
        """Mean of exp(d) - 1 - d."""
        return float(np.mean([math.expm1(d) - d for d in self.gaps])) if self.gaps else None

    @property
    def drift(self) -> list[float]:
        """Sum of d up to and with each token that has one: log of the prefix's importance ratio, old over mu."""
        return np.cumsum(self.gaps).tolist()

    @property
    def flipped(self) -> tuple[int, int] | None:
        """(tokens with a flip, tokens looked at); None where nobody looked."""
        looked = [t.flips for t in self.tokens if t.flips is not None]
        return (sum(f > 0 for f in looked), len(looked)) if looked else None

    @property
    def widest(self) -> list[Token]:
        """Tokens by |d|, the largest first."""
        return sorted((t for t in self.tokens if t.d is not None), key=lambda t: -abs(t.d or 0.0))


def read(store: Store, run: str, step: int, number: int, text_of: Callable[[int], str]) -> Reading:
    """The `number`-th answer of a step, by leader, request and place; those that POPO brought back come last.

    Args:
        text_of: what a token id reads as.

    Raises:
        ValueError: there is no such step or answer; names what there is.
    """
    answers = store.answers(step)
    if not answers:
        kept = f"{store.steps[0]} to {store.steps[-1]}" if store.steps else "none"
        raise ValueError(f"--step: nothing of step {step} is recorded; recorded are {kept}")
    if not 0 <= number < len(answers):
        raise ValueError(f"--sample: {number} is not within the {len(answers)} answers of step {step}, counted from 0")
    answer = answers[number]
    score = store.scores(step).get(answer.origin, Score(step, answer.origin))
    return Reading(run, step, number, len(answers), answer, tuple(_tokens(answer, score, text_of)))


def _tokens(answer: Answer, score: Score, text_of: Callable[[int], str]) -> list[Token]:
    t, head = answer.trajectory, len(answer.trajectory.prompt.tokens)
    mu, old, flips = (_column(x, len(t.tokens)) for x in (t.behaviour_logp, score.old_logp, score.flips))
    advantages = _column(answer.advantages, len(t.tokens))
    tokens = []
    for n, token in enumerate(t.tokens.tolist()):
        sampled, text = bool(t.loss_mask[n]), text_of(token)
        tokens.append(
            Token(
                index=n,
                id=token,
                text=visible(text),
                breaks="\n" in text,
                role="sampled" if sampled else "prompt" if n < head else "given",
                turn=int(t.turns[n]),
                version=int(t.versions[n]),
                advantage=advantages[n] if sampled else None,
                mu=mu[n],
                old=old[n],
                flips=None if flips[n] is None else int(flips[n] or 0),
                experts=() if t.routes is None or n == 0 else tuple(tuple(row) for row in t.routes[n - 1].tolist()),
            )
        )
    return tokens


def _column(values: Any, count: int) -> list[float | None]:
    if values is None:
        return [None] * count
    return [None if math.isnan(v) else v for v in np.asarray(values, dtype=np.float64).tolist()]


# -- text --------------------------------------------------------------------------------------------------------------------------

_SHOWN = {"\n": "↵", " ": "·", "\t": "⇥", "\r": "\\r"}


def visible(text: str) -> str:
    """The text with a sign for every character that has none of its own."""
    return "".join(_visible(c) for c in text)


def _visible(character: str) -> str:
    if character in _SHOWN:
        return _SHOWN[character]
    kind = unicodedata.category(character)
    if kind[0] == "M":
        return "◌" + character  # a combining sign would sit on its neighbour
    if kind[0] in "CZ":
        return f"\\u{ord(character):04x}"
    return character


def token_texts(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], str]:
    """What each token id reads as by itself. Bytes that are no character become \\xNN, where decoding would hide which they were."""
    of_bytes = _byte_level(tokenizer)
    special = set(tokenizer.all_special_ids)

    def text_of(token: int) -> str:
        piece = tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return f"⟨{token}⟩"
        if token in special:
            return str(piece)
        if of_bytes is not None and all(c in of_bytes for c in piece):
            return bytes(of_bytes[c] for c in piece).decode("utf-8", "backslashreplace")
        if len(piece) == 6 and piece.startswith("<0x"):  # SentencePiece's single bytes
            return bytes([int(piece[3:5], 16)]).decode("utf-8", "backslashreplace")
        return str(piece).replace("\N{LOWER ONE EIGHTH BLOCK}", " ")

    return text_of


def plain_ids(token: int) -> str:
    """Where there is no tokenizer."""
    return f"⟨{token}⟩"


def _byte_level(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, int] | None:
    """The characters that stand for bytes; None where the tokenizer is of another kind."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str()).get("decoder") or {} if backend is not None else {}
    parts: Sequence[Mapping[str, Any]] = decoder.get("decoders", [decoder])
    if not any(part.get("type") == "ByteLevel" for part in parts):
        return None
    # GPT-2's table: printable Latin-1 stands for itself, the rest for characters from 256 on, in order.
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}
