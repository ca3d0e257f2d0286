"""`lab inspect`: every character can be seen, colours say what d says, and the page needs nothing else."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path

import numpy as np
import pytest
from inspect_cases import TEXTS, D, record_answer
from rich.console import Console

from megatron_rl.cli import main
from megatron_rl.data.prompts import load_tokenizer
from megatron_rl.lab.colours import BLUE, RED, over, readable_on, strength
from megatron_rl.lab.inspect_html import write_html
from megatron_rl.lab.inspect_terminal import render
from megatron_rl.lab.reading import Reading, plain_ids, read, token_texts, visible
from megatron_rl.record.store import FOLDER, Store


@pytest.fixture
def run(tmp_path: Path) -> Path:
    record_answer(tmp_path)
    return tmp_path


@pytest.fixture
def reading(run: Path) -> Reading:
    return read(Store(run / FOLDER), "demo", 4, 0, TEXTS.__getitem__)


def test_what_is_known_of_each_token(reading: Reading) -> None:
    assert [t.role for t in reading.tokens] == ["prompt", "prompt", "sampled", "sampled", "given", "sampled"]
    assert reading.gaps == pytest.approx(D, abs=1e-6)
    assert [t.flips for t in reading.tokens] == [None, None, 2, 0, None, 0]
    assert reading.tokens[2].experts == ((0, 1), (2, 7))
    assert reading.tokens[0].experts == (), "nothing stands before the first token"
    assert [t.advantage for t in reading.tokens] == [None, None, 0.25, 0.25, None, 0.25]
    assert reading.flipped == (1, 3)
    assert reading.k3 == pytest.approx((np.expm1(0.5) - 0.5 + np.expm1(-0.01) + 0.01) / 3, rel=1e-4)
    assert reading.drift == pytest.approx([0.5, 0.49, 0.49], abs=1e-6)
    assert [t.index for t in reading.widest] == [2, 3, 5]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a b", "a·b"), ("\n\n", "↵↵"), ("\t\r", "⇥\\r"), ("\u200b\u00a0", "\\u200b\\u00a0"), ("\u0301", "◌\u0301"), ("☃é字", "☃é字")],
)
def test_every_character_can_be_seen(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_bytes_that_are_no_character_are_named(tiny_moe: Path) -> None:
    """A snowman is three bytes, and this tokenizer has no token for it."""
    tokenizer = load_tokenizer(str(tiny_moe))
    text_of = token_texts(tokenizer)
    assert [text_of(i) for i in tokenizer("☃")["input_ids"]] == ["\\xe2", "\\x98", "\\x83"]
    assert "".join(text_of(i) for i in tokenizer("é 1\n")["input_ids"]).endswith(" 1\n")
    assert text_of(tokenizer.eos_token_id) == tokenizer.eos_token


def test_colour_grows_with_the_order_of_d() -> None:
    assert [strength(d) for d in (0.0, 1e-4, 1e-2, 1.0, 30.0)] == pytest.approx([0, 0, 0.5, 1, 1])
    assert strength(float("nan")) == 1, "a collapse must not look harmless"
    assert over(1.0, (0, 0, 0)) == RED
    assert over(-1.0, (255, 255, 255)) == BLUE
    assert readable_on((250, 250, 250)) == (0, 0, 0)
    assert readable_on(BLUE) == (255, 255, 255)


@pytest.mark.parametrize("width", [60, 140])
def test_on_a_terminal(reading: Reading, width: int) -> None:
    console = Console(record=True, width=width, force_terminal=True, color_system="truecolor", file=io.StringIO())
    render(reading, console)
    styled = console.export_text(styles=True, clear=False)
    text = console.export_text()
    assert "1+1=2·<b>↵" in text.replace("\n", "").replace("  ", "")
    assert "1 of 3 tokens routed otherwise" in " ".join(text.split())
    assert all(len(line) <= width for line in text.splitlines())
    red = "48;2;{};{};{}".format(*over(0.5, (24, 26, 30)))
    assert re.search(rf"\x1b\[4;[0-9;]*{red}m2\x1b", styled), "the flipped token is underlined, on red"


def test_a_page_that_needs_nothing_else(reading: Reading, tmp_path: Path) -> None:
    file = write_html(reading, tmp_path / "new" / "page.html")
    page = file.read_text()
    answer = page[page.index('<div class="answer">') : page.index("</section>", page.index('<div class="answer">'))]
    assert html.unescape(re.sub(r"<[^>]+>", "", answer)) == "1+1=2·<b>↵\\xe2"
    assert answer.count("<b>") == 0, "text is escaped"
    assert answer.count("flip") == 1
    assert "rgb(196 52 33" in answer
    assert "rgb(29 95 180" in answer
    assert not re.search(r'(?:src|href)="(?!data:|#)', page), "no file and no address"
    assert page.count("<html") == 1


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the model's folder tokens are shown by id."""
    assert main(["lab", "inspect", str(run), "--step", "4"]) == 0
    assert plain_ids(3) in capsys.readouterr().out
    page = run / "page.html"
    assert main(["lab", "inspect", str(run), "--step", "4", "--html", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert page.is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--step", "3"], "recorded are 4 to 4"), (["--step", "4", "--sample", "1"], "not within the 1 answers of step 4"), ([], "of step 0")],
)
def test_what_is_not_there_is_named(run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["lab", "inspect", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err
