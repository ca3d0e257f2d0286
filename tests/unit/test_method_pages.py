"""A page a method: up to date, with mathematics, a picture of the real weight, and a configuration that works."""

from __future__ import annotations

import re

import numpy as np
import pytest
import yaml

from megatron_rl import listing
from megatron_rl.config import MethodConfig, ObjectiveConfig
from megatron_rl.methods import describe, params, registry
from megatron_rl.methods.catalog import METHODS
from megatron_rl.methods.objective import Need
from tools import method_pages
from tools.method_docs.curves import Pair, Probe, slope
from tools.method_docs.pictures import PICTURES

WITHOUT_PICTURE = {"keep_sets", "dynamic_sampling", "popo"}
"""They weigh no token, and their rule is a sentence."""
ALL = list(METHODS.values())


def test_pages_are_up_to_date() -> None:
    assert not method_pages.stale(ALL), "run: python -m tools.method_pages"
    written = {path.stem for path in method_pages.FOLDER.glob("*.md")} - {"index"}
    assert written == set(METHODS), "a page for each method, and none for what is no method"


def test_every_method_has_mathematics_and_a_picture() -> None:
    assert set(method_pages.FORMULAS["methods"]) == set(METHODS)
    assert set(PICTURES) == set(METHODS) - WITHOUT_PICTURE
    assert set(method_pages.NEEDS) == set(Need.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ALL, ids=lambda m: m.name)
def test_latex_is_balanced(method: registry.Method) -> None:
    """Not a compiler, but what hand-written LaTeX breaks by: braces, environments, sized brackets."""
    blocks = re.findall(r"```math\n(.*?)\n```", method_pages.page(method), re.DOTALL)
    assert blocks
    for block in blocks:
        bare = re.sub(r"\\[{}]", "", block)
        assert bare.count("{") == bare.count("}"), block
        assert block.count(r"\begin{cases}") == block.count(r"\end{cases}"), block
        for size in ("bigl", "Bigl"):
            assert len(re.findall(rf"\\{size}\b", block)) == len(re.findall(rf"\\{size[:-1]}r\b", block)), block


@pytest.mark.parametrize("method", ALL, ids=lambda m: m.name)
def test_the_pages_yaml_selects_the_method_with_its_defaults(method: registry.Method) -> None:
    [text] = re.findall(r"```yaml\n(.*?)```", method_pages.page(method), re.DOTALL)
    tree = yaml.safe_load(text)
    if method.kind == "advantage":
        choice = tree["advantage"]
        assert registry.lookup(choice["name"], ("advantage",), "advantage.name") is method
        assert params.build(method.config, choice.get("params", {}), "advantage.params", method.name) == method.config()
        return
    stack = registry.build(
        ObjectiveConfig(**tree.get("objective", {"name": "ppo"})),
        [MethodConfig(**one) for one in tree.get("corrections", [])],
        [MethodConfig(**one) for one in tree.get("methods", [])],
    )
    [part] = [part for part in stack.parts if part.method is method]
    assert part.config == method.config()


@pytest.mark.parametrize("method", [m for m in ALL if set(m.evidence) & set("AIN")], ids=lambda m: m.name)
def test_what_is_not_the_papers_is_never_sold_as_such(method: registry.Method, capsys: pytest.CaptureFixture[str]) -> None:
    """In the code, on the page and in the listing; from papers.md's tags."""
    label = describe.label(method)
    assert label
    page = method_pages.page(method)
    assert "> [!CAUTION]" in page
    assert page.index("[!CAUTION]") < page.index("## Formula")
    for tag in set(method.evidence) & set("AIN"):
        assert f"[{tag}]" in describe.formula(method)
        assert f"> **[{tag}]** {method_pages.CAUTION[tag]}" in page
    listing.print_method(method.name, as_json=False)
    assert label in capsys.readouterr().out


def test_the_listing_labels_exactly_those(capsys: pytest.CaptureFixture[str]) -> None:
    listing.print_methods(as_json=False)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for method in ALL:
        label = describe.label(method)
        assert (label is not None) == bool(set(method.evidence) & set("AIN"))
        assert bool(re.search(r"\[[AIN]\]", lines[method.name])) == (label is not None)
    for tag, words in describe.EVIDENCE.items():
        assert words in lines[tag]


def test_prose_of_a_docstring_is_told_from_its_formulas() -> None:
    assert describe.caveats(METHODS["ppo"]) == [], "a title and two formulas"
    [caveat] = describe.caveats(METHODS["mis"])
    assert caveat.startswith("At sequence level with low = 0 this is seq-MIS"), "an equals sign does not make a formula"
    assert describe.evidence_note(METHODS["sspo"]) == "[A] for the idea, [I] for the gate."
    assert describe.evidence_note(METHODS["ppo"]) == "", "a bare tag says no more than the table"


@pytest.mark.parametrize(
    ("name", "pair", "probe", "log_ratios", "up", "down"),
    [
        # The golden vector of papers.md section 14, ratios 1.105171, 0.740818 and 1.648721: clip 0.2 / 0.2, dual clip 3.
        ("ppo", "theta/old", Probe(), (0.1, -0.3, 0.5), (1.105171, 0.740818, 0), (1.105171, 0, 1.648721)),
        ("cispo", "theta/old", Probe(), (0.1, -0.3, 0.5), (1.105171, 0.740818, 1.28), (1.105171, 0.740818, 1.28)),
        ("sapo", "theta/old", Probe(params={"tau_neg": 1.0}), (0.1, -0.3, 0.5), *[(1.102120, 0.728515, 1.486739)] * 2),
        # A correction alone: the weight of the unweighted policy gradient. min(old/mu, 2) and old/mu inside [0.5, 5].
        ("tis", "old/mu", Probe(), (0.1, 1.0), (1.105171, 2), (1.105171, 2)),
        ("icepop", "old/mu", Probe(), (-1.0, 0.1, 2.0), (0, 1.105171, 0), (0, 1.105171, 0)),
        # Position matters: exp(8 * 0.01) at t = 8, clipped beyond 0.05 sqrt(8) = 0.1414 on both sides of A.
        ("ctpo", "theta/old", Probe(moves="sequence", length=64, position=8), (0.01, 0.02), (1.083287, 0), (1.083287, 0)),
        # theta's probability 0.5 e^0.8 would exceed 1.
        ("policy_gradient", "theta/mu", Probe(prob=0.5), (0.1, 0.8), (1.105171, np.nan), (1.105171, np.nan)),
    ],
)
def test_a_curve_is_the_methods_own_weight(
    name: str, pair: Pair, probe: Probe, log_ratios: tuple[float, ...], up: tuple[float, ...], down: tuple[float, ...]
) -> None:
    x = np.array(log_ratios)
    np.testing.assert_allclose(slope(name, pair, x, probe, 1.0), up, rtol=1e-5)
    np.testing.assert_allclose(-slope(name, pair, x, probe, -1.0), down, rtol=1e-5, atol=1e-9)


def test_a_penalty_is_drawn_without_the_objective() -> None:
    """d/dx of -(e^-x - 1 + x) is e^-x - 1, x = log theta - log ref."""
    x = np.array([-1.0, 0.0, 1.0])
    np.testing.assert_allclose(slope("kl_penalty", "theta/reference", x, Probe(params={"beta": 1.0}), 0.0), np.expm1(-x), rtol=1e-6)


def test_check_names_the_page_that_is_out_of_date(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(method_pages, "FOLDER", tmp_path)
    monkeypatch.setattr("sys.argv", ["method_pages", "--check", "ppo"])
    assert method_pages.main() == 1
    assert "out of date: ppo; run: python -m tools.method_pages ppo" in capsys.readouterr().err
