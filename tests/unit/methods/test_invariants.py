"""What must hold for every method there is, whatever its formula."""

from __future__ import annotations

import dataclasses
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from megatron_rl.methods.catalog import METHODS
from megatron_rl.methods.objective import Correction, Tokens
from megatron_rl.methods.segments import LocalSegments

from .cases import CORRECTIONS, OBJECTIVES, RESTRICTIONS, STACKS, Case, label
from .packs import Outcome, Seq, constant_advantages, evaluate, make, on_policy, pack, random_batch, stack

every_stack = pytest.mark.parametrize("case", STACKS, ids=label)
every_objective = pytest.mark.parametrize("case", [c for c in OBJECTIVES if c[0] != "nll"], ids=label)
every_correction = pytest.mark.parametrize("case", [*CORRECTIONS, *RESTRICTIONS], ids=label)


def same(a: Outcome, b: Outcome, order: list[int] | None = None) -> None:
    """Equal to fp64 rounding; `order[i]` is where a's sequence i stands in b."""
    assert a.loss == pytest.approx(b.loss, rel=1e-10, abs=1e-12)
    for i, grad in enumerate(a.grads):
        torch.testing.assert_close(grad, b.grads[order[i] if order else i], rtol=1e-10, atol=1e-12)
    for name, value in a.metrics.items():
        assert value == pytest.approx(b.metrics[name], rel=1e-10, abs=1e-12), name


def test_every_method_has_a_case() -> None:
    covered = {name for objective, _, rest in STACKS for name in (objective, *(r[0] for r in rest))}
    assert covered == {method.name for method in METHODS.values() if method.apply}


@every_stack
def test_packing_changes_nothing(case: Case) -> None:
    """One pack, one sequence a micro-batch, uneven micro-batches, other orders, more padding: the same loss, gradient and metrics."""
    built, batch = stack(*case), random_batch()
    reference = evaluate(built, batch)
    same(reference, evaluate(built, batch, [[0], [1], [2], [3]]))
    same(reference, evaluate(built, batch, [[3, 1], [2, 0]], padding=5))
    order = [2, 0, 3, 1]
    shuffled: list[Seq] = [batch[order.index(i)] for i in range(4)]
    same(reference, evaluate(built, shuffled), order)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(STACKS), shapes, st.integers(0, 10**6), st.integers(0, 4), st.data())
def test_any_packing_changes_nothing(case: Case, lengths: list[int], seed: int, padding: int, data: st.DataObject) -> None:
    """Any stack, any lengths, any order, any cut into micro-batches, garbage in padding and at tool tokens."""
    built, batch = stack(*case), random_batch(seed, lengths)
    order = data.draw(st.permutations(range(len(batch))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(batch)))))
    split = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch)], strict=True) if a < b]
    same(evaluate(built, batch, garbage=0.0), evaluate(built, batch, split, padding))


@every_stack
def test_what_stands_in_padding_and_tool_tokens_does_not_matter(case: Case) -> None:
    built, batch = stack(*case), random_batch(1)
    reference = evaluate(built, batch, padding=3, garbage=0.0)
    assert all(g.isfinite().all() for g in reference.grads)
    for garbage in (math.nan, math.inf, -math.inf, 1e30):
        same(reference, evaluate(built, batch, padding=3, garbage=garbage))


@every_stack
def test_tool_tokens_do_not_advance_a_position(case: Case) -> None:
    """Taking the tool tokens out leaves the same loss and, on the loss tokens, the same gradient."""
    built, batch = stack(*case), random_batch(2)

    def without(s: Seq) -> Seq:
        return dataclasses.replace(s, **{f.name: getattr(s, f.name)[s.mask] for f in dataclasses.fields(s)})

    full, dense = evaluate(built, batch), evaluate(built, [without(s) for s in batch])
    assert full.loss == pytest.approx(dense.loss, rel=1e-10, abs=1e-12)
    for s, a, b in zip(batch, full.grads, dense.grads, strict=True):
        torch.testing.assert_close(a[s.mask], b, rtol=1e-10, atol=1e-12)
        assert (a[~s.mask] == 0).all()


@every_stack
def test_empty_mask_gives_zero(case: Case) -> None:
    batch = [dataclasses.replace(s, mask=torch.zeros_like(s.mask)) for s in random_batch()]
    outcome = evaluate(stack(*case), batch, padding=2)
    assert outcome.loss == 0
    assert all((g == 0).all() for g in outcome.grads)


@every_stack
def test_a_sequence_without_loss_tokens_among_others_changes_nothing(case: Case) -> None:
    built, batch = stack(*case), random_batch()
    empty = dataclasses.replace(batch[0], mask=torch.zeros_like(batch[0].mask))
    reference, with_empty = evaluate(built, batch), evaluate(built, [*batch, empty])
    same(reference, dataclasses.replace(with_empty, grads=with_empty.grads[:4]))
    assert (with_empty.grads[4] == 0).all()


@every_stack
def test_one_token_sequences(case: Case) -> None:
    outcome = evaluate(stack(*case), random_batch(3, lengths=(1, 1, 1)))
    assert math.isfinite(outcome.loss)
    assert all(g.isfinite().all() for g in outcome.grads)


@every_stack
def test_extreme_ratios_stay_finite(case: Case) -> None:
    """Log-ratios of +-60, a thousand tokens' worth in the product: the clamp at 20 (papers.md 1.1) keeps loss and gradient finite."""
    logp = torch.tensor([-0.5, -60.0, -0.5, -60.0, -1e-3], dtype=torch.float64)
    other = torch.tensor([-60.0, -0.5, -0.6, -1e-3, -60.0], dtype=torch.float64)
    for advantage in (1.0, -1.0):
        for old, mu in ((other, other), (logp, other), (other, logp)):
            outcome = evaluate(stack(*case), [make(logp, old, mu, advantage), make(other, logp, mu, advantage)])
            assert math.isfinite(outcome.loss)
            assert all(g.isfinite().all() for g in outcome.grads)


@every_objective
def test_on_policy_gradient_is_reinforce(case: tuple[str, dict]) -> None:
    """Statement 9 of papers.md 15: at theta = old = mu all have the gradient -A grad log theta; each method's constant is 1 here, but
    for `direct_advantage`, whose is 1 / beta. `epic` with the full prefix gradient multiplies by all later advantages, which is REINFORCE
    with reward to go.
    """
    batch = constant_advantages(on_policy(random_batch(4)))
    outcome = evaluate(stack(*case, aggregation="token-mean"), batch)
    total = sum(int(s.mask.sum()) for s in batch)
    for s, grad in zip(batch, outcome.grads, strict=True):
        coefficient = s.advantages
        if case[1].get("gradient") == "prefix":
            coefficient = torch.where(s.mask, s.advantages, 0.0).flip(0).cumsum(0).flip(0)
        if s.advantages[0].abs() > case[1].get("alpha", 2.0) and case[0] == "acpo_advantage":
            coefficient = torch.zeros_like(coefficient)  # clips the product, so |A| > alpha has no gradient even on-policy
        if case[0] == "direct_advantage":
            coefficient = coefficient / case[1].get("beta", 1.0)
        torch.testing.assert_close(grad, torch.where(s.mask, -coefficient / total, 0.0), rtol=1e-9, atol=1e-12)


@every_correction
def test_on_policy_corrections_do_nothing(case: tuple[str, dict]) -> None:
    batch = on_policy(random_batch(5))
    same_as = evaluate(stack("policy_gradient"), batch)
    outcome = evaluate(stack("policy_gradient", {}, [case]), batch)
    assert outcome.loss == pytest.approx(same_as.loss, rel=1e-12)
    for a, b in zip(outcome.grads, same_as.grads, strict=True):
        torch.testing.assert_close(a, b)


REJECT_ALL = {
    "mis": {"low": 0.9}, "icepop": {}, "geo_rs": {}, "veto": {"low": 0.9}, "trm": {}, "opsm": {}, "m2po": {}, "mis_po": {}, "kpop": {},
}  # fmt: skip


@pytest.mark.parametrize("name", [m.name for m in METHODS.values() if m.kind == "correction" and m.name not in ("tis", "snis")])
def test_all_rejected_gives_zero_loss_and_finite_gradient(name: str) -> None:
    """Every token fell by one nat from mu and has a negative advantage: outside every default bound but the ones widened above."""
    mu = torch.tensor([-0.1, -0.5, -0.3], dtype=torch.float64)
    batch = [make(mu - 1, mu - 1, mu, -1.0), make(mu[:1] - 1, mu[:1] - 1, mu[:1], -1.0)]
    outcome = evaluate(stack("ppo", {}, [(name, REJECT_ALL[name])]), batch, padding=1)
    assert outcome.loss == 0
    assert all((g == 0).all() for g in outcome.grads)


@pytest.mark.parametrize("reach", ["token", "suffix", "sequence"])
def test_all_labels_pruned_gives_zero_loss_and_finite_gradient(reach: str) -> None:
    batch = [dataclasses.replace(s, inside=torch.zeros_like(s.mask)) for s in random_batch()]
    outcome = evaluate(stack("ppo", {}, [("dvp", {"support": "unpruned", "reach": reach})]), batch, padding=1)
    assert outcome.loss == 0
    assert all((g == 0).all() for g in outcome.grads)


@every_stack
def test_only_theta_carries_a_gradient(case: Case) -> None:
    """Old, mu, advantages and every option are detached on entry; weights and masks come out detached."""
    batch = random_batch(6)
    leaves = [s.logp.clone().requires_grad_() for s in batch]
    others = ["old", "mu", "advantages", "uniform", "shift", "reference", "top_theta", "top_old", "top_mu", "kept_mass"]
    live = [dataclasses.replace(s, **{name: getattr(s, name).clone().requires_grad_() for name in others}) for s in batch]
    built = stack(*case)
    totals = built.statistics(pack(live, leaves, None, 1, 0.0))
    tokens = pack(live, leaves, totals, 1, 0.0)
    for part in (*built.corrections, *([built.vocabulary] if built.vocabulary else [])):
        own = {k.split("/", 1)[1]: v for k, v in totals.items() if k.startswith(part.method.name)}
        assert part.method.apply is not None
        answer: Correction = part.method.apply(dataclasses.replace(tokens, totals=own), part.config)
        assert not answer.weight_T.requires_grad
        assert answer.keep_T.dtype == torch.bool
    from .packs import denominators

    answer_all = built.evaluate(tokens, denominators(batch))
    answer_all.loss.backward()
    assert all(leaf.grad is not None for leaf in leaves)
    assert all(getattr(s, name).grad is None for s in live for name in others)
    assert not any(number.requires_grad for pair in answer_all.metrics.values() for number in pair)


@every_stack
def test_single_precision_agrees_with_double(case: Case) -> None:
    """Training is fp32: the same answer to 1e-4, on data whose thresholds no rounding crosses."""
    batch = random_batch(7)

    def single(s: Seq) -> Seq:
        fields = {f.name: getattr(s, f.name) for f in dataclasses.fields(s)}
        return Seq(**{k: v.float() if v.dtype == torch.float64 else v for k, v in fields.items()})

    double, low = evaluate(stack(*case), batch), evaluate(stack(*case), [single(s) for s in batch])
    assert low.loss == pytest.approx(double.loss, rel=1e-4, abs=1e-5)
    for a, b in zip(double.grads, low.grads, strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(a.float(), b, rtol=1e-4, atol=1e-5)


def test_half_precision_log_probs_are_raised() -> None:
    segments = LocalSegments(torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), 1)
    x_T = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16)
    tokens = Tokens.of(x_T, x_T, x_T, x_T, segments)
    assert tokens.logp_T.dtype == tokens.old_logp_T.dtype == tokens.advantages_T.dtype == torch.float32
