"""Each objective's gradient against autograd of the paper's formula, written out again here, one sequence at a time, in float64.

Nothing is shared with the implementation but torch: loops where the methods use scans, gradients through the whole sequence where the
methods use detached statistics. `sg` is stop-gradient, as the papers write it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from .cases import CORRECTIONS, OBJECTIVES, RESTRICTIONS, label
from .packs import MAX_TOKENS, Seq, constant_advantages, evaluate, make, random_batch, stack

Params = dict[str, Any]


class Row:
    """The loss tokens of one sequence; `logp` carries the gradient."""

    def __init__(self, s: Seq, logp: Tensor) -> None:
        m = s.mask
        self.logp, self.old, self.mu, self.adv = logp[m], s.old[m], s.mu[m], s.advantages[m]
        self.turns, self.uniform, self.shift = s.turns[m], s.uniform[m], s.shift[m]
        self.top = {"theta": s.top_theta[m], "old": s.top_old[m], "mu": s.top_mu[m]}
        self.has_label, self.inside, self.reference = s.has_label[m], s.inside[m], s.reference[m]
        self.n = len(self.logp)

    def log(self, pair: str) -> Tensor:
        values = {"theta": self.logp, "old": self.old, "mu": self.mu}
        top, bottom = pair.split("/")
        return values[top] - values[bottom]


def sg(x: Tensor) -> Tensor:
    return x.detach()


def ppo_gain(r: Tensor, a: Tensor, low: float, high: float, dual: float | None) -> Tensor:
    gain = torch.min(r * a, r.clamp(1 - low, 1 + high) * a)
    return gain if dual is None else torch.where(a < 0, torch.max(gain, dual * a), gain)


def ppo(row: Row, p: Params) -> Tensor:
    return ppo_gain(row.log("theta/old").exp(), row.adv, p.get("clip_low", 0.2), p.get("clip_high", 0.2), p.get("dual_clip", 3.0))


def grpo(row: Row, p: Params) -> Tensor:
    return ppo(row, {"dual_clip": None, **p})


def gspo(row: Row, p: Params) -> Tensor:
    """One term a sequence, with the gradient through the mean; spread evenly so that any aggregation adds it up."""
    s = row.log("theta/old").mean().exp()
    return ppo_gain(s, row.adv.mean(), p["clip_low"], p["clip_high"], None).expand(row.n)


def gspo_token(row: Row, p: Params) -> Tensor:
    s = sg(row.log("theta/old").mean().exp()) * row.logp.exp() / sg(row.logp.exp())
    return ppo_gain(s, row.adv, p["clip_low"], p["clip_high"], None)


def gmpo(row: Row, p: Params) -> Tensor:
    c, a = p.get("clip", 0.4), row.adv.mean()
    sign = math.copysign(1, float(a))
    m = sign * torch.min(sign * row.log("theta/old"), sign * row.log("theta/old").clamp(-c, c))
    return (a * m.mean().exp()).expand(row.n)


def cispo(row: Row, p: Params) -> Tensor:
    r = row.log(p.get("anchor", "theta/old")).exp()
    low, high = 1 - p.get("clip_low", 1.0), 1.28
    weight = sg(r.clamp(low, high))
    if p.get("unified_mask"):
        weight = weight * ~(((row.adv > 0) & (r > high)) | ((row.adv < 0) & (r < low)))
    return weight * row.adv * row.logp


def sapo(row: Row, p: Params) -> Tensor:
    tau = torch.where(row.adv > 0, 1.0, 1.05).double()
    return 4 / tau * torch.sigmoid(tau * (row.log("theta/old").exp() - 1)) * row.adv


def sspo(row: Row, p: Params) -> Tensor:
    a = row.adv.mean()
    tau = torch.tensor(p.get("tau_pos", 1.0) if a > 0 else p.get("tau_neg", 1.0), dtype=torch.float64)
    log_scale = p.get("coordinate", "log") == "log"
    x = row.log("theta/old") if log_scale else row.log("theta/old").exp() - 1
    g = {
        "arctan": lambda: torch.atan(tau * x) / tau,
        "sigmoid": lambda: (2 / tau) * torch.tanh(tau * x / 2),  # 4/tau (sigmoid - 1/2) is a hyperbolic tangent
        "erf": lambda: math.sqrt(math.pi) * torch.erf(tau * x) / (2 * tau),
        "softsign": lambda: x / (1 + tau * x.abs()),
    }[p.get("gate", "arctan")]()
    return (a * (g if log_scale else (1 + g).log()).mean().exp()).expand(row.n)


def minirl(row: Row, p: Params) -> Tensor:
    r, rho = row.log("theta/old").exp(), row.log("theta/mu").exp()
    mask = ~(((row.adv > 0) & (r > 1.27)) | ((row.adv < 0) & (r < 0.8)))
    return sg(rho.clamp(max=p.get("weight_cap", math.inf))) * mask * row.adv * row.logp


def minpro(row: Row, p: Params) -> Tensor:
    rho = row.log(p.get("anchor", "theta/mu")).exp()
    weights = [rho[t] * (min(rho[:t].tolist()) if t else 1.0) for t in range(row.n)]
    return sg(torch.stack(weights).clamp(1 - p.get("clip_low", 1.0), 1.28)) * row.adv * row.logp


def prefix_clip(value: list[Tensor], row: Row, low: float, high: float, power: float, dual: bool) -> Tensor:
    gains = []
    for t in range(row.n):
        a, log_w = row.adv[t], sg(value[t]) + row.logp[t] - sg(row.logp[t])
        edge = high * (t + 1) ** power
        gain = torch.min(log_w.exp() * a, log_w.clamp(-low * (t + 1) ** power, edge).exp() * a)
        gains.append(torch.max(gain, a * math.exp(edge)) if dual and a < 0 else gain)
    return torch.stack(gains)


def pnpo(row: Row, p: Params) -> Tensor:
    ratios = row.log("theta/old")
    return prefix_clip([ratios[: t + 1].mean() for t in range(row.n)], row, 0.025, 0.05, -0.5, True)


def ctpo(row: Row, p: Params) -> Tensor:
    ratios = row.log("theta/old")
    p = {"low": 0.025, "high": 0.05, "power": 0.5, "dual_clip": True, **p}
    return prefix_clip([ratios[: t + 1].sum() for t in range(row.n)], row, p["low"], p["high"], p["power"], p["dual_clip"])


def epic(row: Row, p: Params) -> Tensor:
    """The clip by the sign of u(W) - delta and the side of 1, not by roots."""
    log, delta = row.log(p.get("anchor", "theta/mu")), p.get("delta", 0.05)
    gains = []
    for t in range(row.n):
        log_weight = log[: t + 1].sum()
        if p.get("gradient") != "prefix":
            log_weight = sg(log_weight) + row.logp[t] - sg(row.logp[t])
        w = log_weight.exp()
        u = w - 1 - log_weight if p.get("generator") == "forward" else w * log_weight - w + 1
        outward = (row.adv[t] > 0) == (log_weight > 0)
        gains.append(sg(w) * 0 if u > delta and outward else w * row.adv[t])
    return torch.stack(gains)


def divergence(row: Row, which: str, anchor: str) -> Tensor:
    base_name = anchor.split("/")[1]
    theta, base = row.logp.detach().exp(), {"old": row.old, "mu": row.mu}[base_name].exp()
    out = []
    for t in range(row.n):
        p, q = [float(theta[t])], [float(base[t])]
        if which.startswith("top_k"):
            for k in range(row.top["theta"].shape[1]):
                if not (row.has_label[t] and k == 0):  # the label is the first candidate where it is one
                    p.append(math.exp(row.top["theta"][t, k]))
                    q.append(math.exp(row.top[base_name][t, k]))
        p.append(1 - sum(p))
        q.append(1 - sum(q))
        if which.endswith("tv"):
            out.append(sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2)
        else:
            out.append(sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)))
    return torch.tensor(out, dtype=torch.float64)


def outward(row: Row, anchor: str) -> Tensor:
    r = sg(row.log(anchor).exp())
    return ((row.adv > 0) & (r > 1)) | ((row.adv < 0) & (r < 1))


def nfpo(row: Row, p: Params) -> Tensor:
    steps, which = p.get("steps", 2), p.get("divergence", "binary_tv")
    rho = row.log("theta/mu").exp()
    trace = torch.stack([sg(rho)[t + 1 : t + steps].prod() for t in range(row.n)]).clamp(max=10)
    mask = ~((divergence(row, which, "theta/mu") > p.get("threshold", 0.15)) & outward(row, "theta/mu"))
    return mask * row.adv * (rho - 1) * trace


def vespo(row: Row, p: Params) -> Tensor:
    w = sg(row.log(p.get("anchor", "theta/mu")).sum().exp())
    phi = torch.where(row.adv > 0, math.exp(3) * w**2 * (-3 * w).exp(), math.exp(2) * w**3 * (-2 * w).exp())
    return phi * row.adv * row.logp


def drpo(row: Row, p: Params) -> Tensor:
    r = row.log("theta/mu").exp()
    return row.adv * r - row.adv.abs() * row.mu.exp() * (r - 1) ** 2 / (2 * 0.15)


def dppo(row: Row, p: Params) -> Tensor:
    anchor = p.get("anchor", "theta/mu")
    far = divergence(row, p.get("divergence", "binary_tv"), anchor) > p["threshold"]
    cap = p.get("ratio_cap", 20.0)
    weight = sg(row.log("theta/mu").exp().clamp(max=math.inf if cap is None else cap))
    return row.adv * weight * ~(far & outward(row, anchor)) * row.logp


def cppo(row: Row, p: Params, budget: float | None = None) -> Tensor:
    d = divergence(row, p.get("divergence", "binary_tv"), "theta/mu")
    delta, budget = p.get("threshold", 0.15), p.get("budget", 0.015) if budget is None else budget
    rho, gains, spent, weights = row.log("theta/mu").exp(), [], 0.0, 0.0
    for t in range(row.n):
        w = 1 - 0.2 * t / (row.n - 1) if row.n > 1 else 1.0
        allowed = min(delta, delta + budget * weights - spent)
        factor = 1.0
        if row.adv[t] * (sg(rho)[t] - 1) > 0 and w * d[t] > allowed:
            factor = max(0.0, allowed / float(w * d[t])) if p.get("soft") else 0.0
        gains.append(factor * rho[t] * row.adv[t])
        spent, weights = spent + w * float(d[t]), weights + w
    return torch.stack(gains)


def sis(row: Row, p: Params) -> Tensor:
    gains = []
    for t in range(row.n):
        w = row.log("theta/old")[t].exp()
        envelope = max(math.exp(row.top["theta"][t, k] - row.top["old"][t, k]) for k in range(row.top["old"].shape[1]))
        if row.has_label[t] and row.uniform[t] < min(1.0, float(sg(w)) / envelope):
            gains.append(row.adv[t] * row.logp[t].exp() / sg(row.logp[t].exp()))
        else:
            gains.append(ppo_gain(w, row.adv[t], 0.2, 0.2, None))
    return torch.stack(gains)


def acpo_advantage(row: Row, p: Params) -> Tensor:
    alpha = p.get("alpha", 2.0)
    return (row.log("theta/old").exp() * row.adv).clamp(-alpha, alpha)


def sorl(row: Row, p: Params) -> Tensor:
    gains = []
    for t in range(row.n):
        w = sg(row.log("theta/old")[row.turns == row.turns[t]].mean().exp()) * row.logp[t].exp() / sg(row.logp[t].exp())
        gains.append(ppo_gain(w, row.adv[t], 0.1, 0.1, None))
    return torch.stack(gains)


def rspo(row: Row, p: Params) -> Tensor:
    """The base's formula on gamma times the ratio."""
    gamma = (-row.shift).exp().clamp(min=p.get("gamma_min", 0.5))
    row.old = row.old - gamma.log()
    return {"gmpo": gmpo, "grpo": grpo, "gspo": gspo}[p.get("base", "gmpo")](row, p.get("base_params", {}))


def direct_advantage(row: Row, p: Params) -> Tensor:
    """Minus the square of each step, gradient through its whole sum, spread evenly over its tokens."""
    base = {"old": row.old, "reference": row.reference, "mu": row.mu}[p.get("base", "old")]
    gains = torch.zeros_like(row.logp)
    for step in row.turns.unique():
        own = row.turns == step
        log_ratio = (row.logp[own] - base[own]).sum()
        gains = gains - own * (log_ratio - row.adv[own].mean() / p.get("beta", 1.0)) ** 2 / 2 / own.sum()
    return gains


def policy_gradient(row: Row, p: Params) -> Tensor:
    weight = p.get("weight", "theta/mu")
    return row.adv * (row.logp if weight == "none" else row.log(weight).exp())


def nll(row: Row, p: Params) -> Tensor:
    return row.logp


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "ppo": ppo, "grpo": grpo, "dr_grpo": grpo, "dapo_dynamic": lambda row, p: grpo(row, {"clip_high": 0.28}), "gspo": gspo,
    "gspo_token": gspo_token, "gmpo": gmpo, "cispo": cispo, "sapo": sapo, "sspo": sspo, "minirl": minirl, "minpro": minpro, "pnpo": pnpo,
    "ctpo": ctpo, "epic": epic, "nfpo": nfpo, "vespo": vespo, "drpo": drpo, "dppo": dppo, "cppo": cppo, "sis": sis,
    "acpo_advantage": acpo_advantage, "sorl": sorl, "rspo": rspo, "policy_gradient": policy_gradient, "nll": nll,
    "direct_advantage": direct_advantage,
}  # fmt: skip


def expected(name: str, params: Params, batch: list[Seq], aggregation: str) -> list[Tensor]:
    """Gradients of minus the aggregated gain, by plain autograd."""
    leaves = [s.logp.clone().requires_grad_() for s in batch]
    rows = [Row(s, leaf) for s, leaf in zip(batch, leaves, strict=True)]
    if name == "acpo_adaptive":
        gains = adaptive_gains(rows, params)
    elif params.get("budget_rule") == "quantile":
        all_d = torch.cat([divergence(row, params["divergence"], "theta/mu") for row in rows]).sort().values
        p90 = float(all_d[math.ceil(0.9 * len(all_d)) - 1])  # the smallest value with nine tenths at or below it
        gains = [cppo(row, params, min(max(p90, 0.02), 0.04)) for row in rows]
    else:
        gains = [FORMULAS[name](row, params) for row in rows]
    loss = -aggregate(gains, aggregation)
    return list(torch.autograd.grad(loss, leaves, materialize_grads=True))


def adaptive_gains(rows: list[Row], p: Params) -> list[Tensor]:
    p = {"bins": 5, "base": 0.2, "alpha": 3.0, "dual_clip": 3.0, **p}
    r = torch.cat([row.log("theta/old").exp().detach() for row in rows])
    bins = torch.cat([(row.logp.detach().exp() * p["bins"]).floor() for row in rows])
    sigma = {int(b): math.sqrt(float(r[bins == b].var(unbiased=False)) + 1e-8) for b in bins.unique()}
    gains = []
    for row in rows:
        eps = torch.tensor([min(3.0, p["base"] + p["alpha"] * sigma[int(x.exp() * p["bins"])]) for x in row.logp.detach()]).double()
        ratios = row.log("theta/old").exp()
        gain = torch.min(ratios * row.adv, torch.max(torch.min(ratios, 1 + eps), 1 - eps) * row.adv)
        gains.append(gain if p["dual_clip"] is None else torch.where(row.adv < 0, torch.max(gain, p["dual_clip"] * row.adv), gain))
    return gains


def aggregate(gains: list[Tensor], aggregation: str) -> Tensor:
    """papers.md 1.5."""
    n, tokens = len(gains), sum(len(g) for g in gains)
    return {
        "token-mean": lambda: sum(g.sum() for g in gains) / tokens,
        "seq-mean-token-mean": lambda: sum(g.mean() for g in gains) / n,
        "seq-mean-token-sum": lambda: sum(g.sum() for g in gains) / n,
        "seq-mean-token-sum-norm": lambda: sum(g.sum() for g in gains) / (n * MAX_TOKENS),
    }[aggregation]()


@pytest.mark.parametrize("case", OBJECTIVES, ids=label)
@pytest.mark.parametrize("per_token", [True, False], ids=["token-advantages", "sequence-advantages"])
def test_gradient_is_that_of_the_written_formula(case: tuple[str, Params], per_token: bool) -> None:
    """With the method's own aggregation; three batches of growing drift, so that both sides of every clip are met."""
    for seed, spread in ((11, 0.05), (12, 0.3), (13, 0.8)):
        batch = random_batch(seed, lengths=(6, 1, 9, 4), spread=spread)
        batch = batch if per_token else constant_advantages(batch)
        built = stack(*case)
        outcome = evaluate(built, batch, padding=2)
        for actual, reference in zip(outcome.grads, expected(*case, batch, built.aggregation), strict=True):
            torch.testing.assert_close(actual, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("case", [("ppo", {}), ("gspo", {"clip_low": 0.1, "clip_high": 0.1})], ids=label)
def test_every_aggregation(case: tuple[str, Params], aggregation: str) -> None:
    batch = random_batch(14)
    outcome = evaluate(stack(*case, aggregation=aggregation), batch, [[0, 2], [1, 3]])
    for actual, reference in zip(outcome.grads, expected(*case, batch, aggregation), strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-9, atol=1e-12)


def kept_and_weight(name: str, p: Params, row: Row) -> Tensor:
    """Weight x mask of a correction, sequence by sequence (those without mini-batch statistics)."""
    log = sg(row.log(p.get("pair", {"trm": "theta/mu", "opsm": "theta/mu", "mis_po": "theta/mu"}.get(name, "old/mu"))))
    ones = torch.ones(row.n, dtype=torch.float64)
    default = {"mis": "sequence", "geo_rs": "geometric"}.get(name, "token")
    turn = torch.stack([log[row.turns == k].mean() for k in row.turns])
    levels = {"token": log, "turn": turn, "sequence": log.sum() * ones, "geometric": log.mean() * ones}
    r = levels[p.get("level", default)].exp()
    if name == "dvp":
        outside = {"token": ~row.inside, "suffix": (~row.inside).cumsum(0) > 0, "sequence": ~row.inside.all().expand(row.n)}
        return ones * ~outside[p.get("reach", "token")]
    if name == "tis":
        return r.clamp(max=p.get("cap", 2.0))
    if name in ("mis", "icepop", "geo_rs"):
        inside = (r >= p.get("low", 0.0)) & (r <= p.get("high", 2.0))
        return inside * (ones if name == "geo_rs" else r)
    if name == "veto":
        return ones * bool((log.exp() >= p["low"]).all() and (log.exp() <= p.get("high", math.inf)).all())
    if name == "opsm":
        return ones * (not (row.adv.mean() < 0 and -log.mean() > 1e-4))
    if name == "mis_po":
        return ones * (r >= 0.5) * (r <= 2) * bool(p["geo_low"] <= log.mean().exp() <= p["geo_high"])
    if name == "kpop":
        q, b = row.old.exp(), row.mu.exp()
        forward = b * (b / q).log() + (1 - b) * ((1 - b) / (1 - q)).log()
        backward = q * (q / b).log() + (1 - q) * ((1 - q) / (1 - b)).log()
        return ones * (torch.max(forward, backward) <= p["upper"])
    return ones * trm_accepts(p, row, log)


def trm_accepts(p: Params, row: Row, log: Tensor) -> bool:
    k3, deviation = log.exp() - 1 - log, (log.exp() - 1).abs()
    largest, average = (log**2 / 2).max(), k3.mean()
    if p.get("source") == "top_k":
        largest = divergence(row, "top_k_kl", "theta/mu").max()
    if p.get("source") == "exact":  # the candidates are the vocabulary
        base = row.top[p.get("pair", "theta/mu").split("/")[1]]
        kl = (base.exp() * (base - row.top["theta"])).sum(1)
        largest, average = kl.max(), kl.mean()
    if p["criterion"] == "ser":
        return bool(deviation.mean() <= p["ratio_threshold"])
    if p["criterion"] == "length_neutral":
        w = torch.tensor([min(1.0, (row.n - t) * 0.1, math.sqrt((row.n - t) * 0.05 / 2)) for t in range(1, row.n + 1)])
        return bool((deviation * w).sum() <= p["ratio_threshold"] * w.sum())
    verdicts = {"max": largest <= p.get("max_threshold", 0.05), "mean": average <= p.get("mean_threshold", 0.001)}
    return bool(all(verdicts.values()) if p["criterion"] == "both" else verdicts[p["criterion"]])


WRITTEN = [*[c for c in CORRECTIONS if c[0] not in ("snis", "m2po")], *[c for c in RESTRICTIONS if c[1].get("support") == "unpruned"]]


@pytest.mark.parametrize("case", WRITTEN, ids=label)
def test_corrections_are_the_written_weights_and_masks(case: tuple[str, Params]) -> None:
    kept_some = dropped_some = False
    for seed, spread in ((21, 0.1), (22, 0.4), (23, 0.8)):
        batch = random_batch(seed, lengths=(6, 1, 9, 4), spread=spread)
        outcome = evaluate(stack("policy_gradient", {"weight": "none"}, [case], "seq-mean-token-sum"), batch, padding=2)
        for s, grad in zip(batch, outcome.grads, strict=True):
            weight = kept_and_weight(*case, Row(s, s.logp))
            torch.testing.assert_close(grad[s.mask], -weight * s.advantages[s.mask] / len(batch), rtol=1e-9, atol=1e-12)
            kept_some, dropped_some = kept_some or bool((weight > 0).any()), dropped_some or bool((weight == 0).any())
    assert kept_some
    assert dropped_some or case[0] == "tis", "the case tests nothing: no token was ever dropped"


def test_snis_divides_by_the_mean_over_the_mini_batch() -> None:
    batch = random_batch(24)
    rows = [Row(s, s.logp) for s in batch]
    for level in ("sequence", "token"):
        built = stack("policy_gradient", {"weight": "none"}, [("snis", {"level": level})], "token-mean")
        outcome = evaluate(built, batch, [[0], [1, 2, 3]])
        raw = [row.log("old/mu").exp() if level == "token" else row.log("old/mu").sum().exp().expand(row.n) for row in rows]
        mean = torch.cat(raw).mean() if level == "token" else torch.stack([w[0] for w in raw]).mean()
        total = sum(row.n for row in rows)
        for s, grad, w in zip(batch, outcome.grads, raw, strict=True):
            torch.testing.assert_close(grad[s.mask], -(w / mean) * s.advantages[s.mask] / total)
        per = torch.cat(raw) if level == "token" else torch.stack([w[0] for w in raw])
        assert outcome.metrics["snis/effective_share"] == pytest.approx(float(per.sum() ** 2 / (len(per) * (per**2).sum())))


def test_m2po_drops_the_largest_until_the_mean_is_small() -> None:
    """Sorting the whole mini-batch gives the same tokens as the histogram."""
    batch = random_batch(25, lengths=(40, 30, 50), spread=0.5)
    outcome = evaluate(stack("policy_gradient", {"weight": "none"}, [("m2po", {})]), batch, [[0], [1], [2]])
    squares = torch.cat([Row(s, s.logp).log("theta/mu") ** 2 for s in batch])
    ascending = squares.sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
    limit = ascending[int((means < 0.04).sum()) - 1]
    kept = torch.cat([grad[s.mask] != 0 for s, grad in zip(batch, outcome.grads, strict=True)])
    assert 0 < int(kept.sum()) < len(kept)
    assert kept.tolist() == (squares <= limit).tolist()


@pytest.mark.parametrize("case", [("kl_penalty", {"beta": 0.3}), ("kl_penalty", {"beta": 0.3, "base": "mu", "estimator": "k2"})], ids=label)
def test_penalty_adds_to_every_loss_token(case: tuple[str, Params]) -> None:
    """Also to tokens that a correction rejected: veto with low 1 drops everything but unmoved tokens."""
    batch = random_batch(26)
    outcome = evaluate(stack("ppo", {}, [("veto", {"low": 1.0}), case]), batch)
    leaves = [s.logp.clone().requires_grad_() for s in batch]
    total = torch.zeros((), dtype=torch.float64)
    for s, leaf in zip(batch, leaves, strict=True):
        d = ((s.reference if case[1].get("estimator") is None else s.mu) - leaf)[s.mask]
        total = total + 0.3 * (d.exp() - 1 - d if case[1].get("estimator") is None else d**2 / 2).sum()
    count = sum(int(s.mask.sum()) for s in batch)
    for actual, reference in zip(outcome.grads, torch.autograd.grad(total / count, leaves), strict=True):
        torch.testing.assert_close(actual, reference)


def test_sorl_clipped_loss_completes_the_gradient() -> None:
    """Statement 14: the PPO gradient and C add up to the unclipped turn-ratio gradient; and the divisor only ever shrinks."""
    batch = random_batch(27, spread=0.6)
    outcome = evaluate(stack("sorl", {"clip_low": 0.1, "clip_high": 0.1}), batch)
    unclipped = evaluate(stack("sorl", {"clip_low": 1.0, "clip_high": 1e9}), batch)
    assert outcome.clipped_grads is not None
    assert unclipped.clipped_grads is not None
    assert any((g != 0).any() for g in outcome.clipped_grads)
    assert all((g == 0).all() for g in unclipped.clipped_grads)
    for kept, clipped, whole in zip(outcome.grads, outcome.clipped_grads, unclipped.grads, strict=True):
        torch.testing.assert_close(kept + clipped, whole)
    built = stack("sorl", {"c_min": 1.0})
    assert [built.gradient_divisor(norm) for norm in (0.0, 0.4, 2.5)] == [1.0, 1.0, 2.5]
    assert stack("ppo").gradient_divisor(9.0) == 1.0


LIMITS: list[tuple[tuple[str, Params], tuple[str, Params]]] = [
    (("ppo", {"clip_low": 1.0, "clip_high": 1e9, "dual_clip": None}), ("policy_gradient", {"weight": "theta/old"})),
    (("dppo", {"threshold": 2.0, "ratio_cap": None}), ("policy_gradient", {})),
    (("cppo", {"threshold": 1e6}), ("policy_gradient", {})),
    (("cppo", {"threshold": 0.1, "w_min": 1.0, "budget": 1.0}), ("dppo", {"threshold": 0.1, "ratio_cap": None})),
    (("nfpo", {"steps": 1, "threshold": 2.0}), ("policy_gradient", {})),
    (("drpo", {"threshold": 1e12}), ("policy_gradient", {})),
    (("acpo_advantage", {"alpha": 1e9}), ("policy_gradient", {"weight": "theta/old"})),
    (("acpo_adaptive", {"base": 0.2, "alpha": 0.0}), ("ppo", {})),
    (("minirl", {"clip_low": 1.0, "clip_high": 1e9}), ("policy_gradient", {})),
    (("cispo", {"clip_high": 1e9}), ("policy_gradient", {"weight": "theta/old"})),
    (("rspo", {"gamma_min": 1.0}), ("gmpo", {})),
    (("sspo", {"tau_pos": 1e-6, "tau_neg": 1e-6}), ("gmpo", {"clip": 1e6})),
    (("gspo", {"clip_low": 1.0, "clip_high": 1e9}), ("gmpo", {"clip": 1e6})),
    (("grpo", {"clip_low": 1.0, "clip_high": 1e9}), ("policy_gradient", {"weight": "theta/old"})),
    (("dr_grpo", {"clip_low": 1.0, "clip_high": 1e9}), ("policy_gradient", {"weight": "theta/old"})),
    (("dapo_dynamic", {"clip_low": 1.0, "clip_high": 1e9}), ("policy_gradient", {"weight": "theta/old"})),
    (("sapo", {"tau_pos": 1e-7, "tau_neg": 1e-7}), ("policy_gradient", {"weight": "theta/old"})),
    (("vespo", {"k_pos": 0.0, "lambda_pos": 0.0, "k_neg": 0.0, "lambda_neg": 0.0}), ("policy_gradient", {"weight": "none"})),
    (("nfpo", {"steps": 1, "threshold": 0.1}), ("dppo", {"threshold": 0.1, "ratio_cap": None})),
    (("dppo", {"divergence": "binary_tv", "threshold": 1e-12, "ratio_cap": None}), ("minirl", {"clip_low": 0.0, "clip_high": 0.0})),
    (("epic", {"delta": 1e12, "anchor": "theta/old"}), ("ctpo", {"low": 1e6, "high": 1e6, "power": 0.0, "dual_clip": False})),
]


@pytest.mark.parametrize(("case", "limit"), LIMITS, ids=[f"{label(a)}->{label(b)}" for a, b in LIMITS])
def test_a_threshold_that_never_binds_leaves_the_base(case: tuple[str, Params], limit: tuple[str, Params]) -> None:
    """cppo with w_min = 1 and budget >= 1 is dppo: statement 3 (its threshold then never shrinks). sspo, sapo with tau -> 0 have no gate.
    A divergence mask of width 0 and a clip of width 0 both drop every outward move."""
    batch = random_batch(28)
    if "minirl" in (case[0], limit[0]):  # its clip looks at old, dppo's mask at mu
        batch = [dataclasses.replace(s, mu=s.old) for s in batch]
    a, b = (evaluate(stack(*c, aggregation="token-mean"), batch) for c in (case, limit))
    for x, y in zip(a.grads, b.grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)


ONE_TOKEN_LIMITS: list[tuple[tuple[str, Params], tuple[str, Params]]] = [
    (("minpro", {"clip_high": 1e9, "anchor": "theta/old"}), ("policy_gradient", {"weight": "theta/old"})),
    (("pnpo", {"low": 1e6, "high": 1e6, "dual_clip": False}), ("policy_gradient", {"weight": "theta/old"})),
    (("ctpo", {"low": 1e6, "high": 1e6, "dual_clip": False}), ("policy_gradient", {"weight": "theta/old"})),
    (("gspo_token", {"clip_low": 0.1, "clip_high": 0.1}), ("grpo", {"clip_low": 0.1, "clip_high": 0.1})),
    (("gspo", {"clip_low": 0.1, "clip_high": 0.1}), ("grpo", {"clip_low": 0.1, "clip_high": 0.1})),
    (("sorl", {"clip_low": 0.1, "clip_high": 0.1}), ("grpo", {"clip_low": 0.1, "clip_high": 0.1})),
    (("nfpo", {"steps": 9, "threshold": 2.0}), ("policy_gradient", {})),
    (("vespo", {"k_pos": 1.0, "lambda_pos": 0.0, "k_neg": 1.0, "lambda_neg": 0.0}), ("policy_gradient", {})),
]


@pytest.mark.parametrize(("case", "limit"), ONE_TOKEN_LIMITS, ids=[f"{label(a)}->{label(b)}" for a, b in ONE_TOKEN_LIMITS])
def test_prefix_and_sequence_methods_are_token_methods_on_one_token(case: tuple[str, Params], limit: tuple[str, Params]) -> None:
    """The prefix, the turn and the sequence of a single token are the token."""
    batch = random_batch(29, lengths=(1,) * 12)
    a, b = (evaluate(stack(*c, aggregation="token-mean"), batch) for c in (case, limit))
    for x, y in zip(a.grads, b.grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def test_sis_that_accepts_nothing_is_ppo_and_that_accepts_everything_is_reinforce() -> None:
    """A uniform of 1 is below no probability. With candidates whose ratio is the label's own, the envelope is reached: all are accepted."""
    batch = random_batch(30)
    refused = [dataclasses.replace(s, uniform=torch.ones_like(s.uniform)) for s in batch]
    a, b = evaluate(stack("sis"), refused), evaluate(stack("ppo", aggregation="seq-mean-token-mean"), refused)
    assert a.metrics["sis/accepted_share"] == 0
    for x, y in zip(a.grads, b.grads, strict=True):
        torch.testing.assert_close(x, y)
    tight = [
        dataclasses.replace(
            s,
            top_theta=s.logp[:, None].expand(-1, 3),
            top_old=s.old[:, None].expand(-1, 3),
            has_label=torch.ones_like(s.mask),
            uniform=0.99 * s.uniform,
        )
        for s in batch
    ]
    a, b = evaluate(stack("sis"), tight), evaluate(stack("policy_gradient", {"weight": "none"}, aggregation="seq-mean-token-mean"), tight)
    assert a.metrics["sis/accepted_share"] == 1
    for x, y in zip(a.grads, b.grads, strict=True):
        torch.testing.assert_close(x, y)


def test_direct_advantage_limits() -> None:
    """beta -> 0: beta times its gradient is REINFORCE with the step's advantage. beta -> infinity: the base pulls, and nothing else."""
    batch = [dataclasses.replace(s, turns=torch.zeros_like(s.turns)) for s in constant_advantages(random_batch(31))]
    aggregation = "seq-mean-token-sum"
    small = evaluate(stack("direct_advantage", {"beta": 1e-9}), batch)
    reinforce = evaluate(stack("policy_gradient", {"weight": "none"}, (), aggregation), batch)
    for x, y in zip(small.grads, reinforce.grads, strict=True):
        torch.testing.assert_close(1e-9 * x, y, rtol=1e-6, atol=1e-9)
    large = evaluate(stack("direct_advantage", {"beta": 1e9}), batch)
    for s, x in zip(batch, large.grads, strict=True):
        log_ratio = (s.logp - s.old)[s.mask].sum()
        torch.testing.assert_close(x, torch.where(s.mask, log_ratio / len(batch), 0.0), rtol=1e-6, atol=1e-8)


def test_direct_advantage_rests_at_the_tilted_base() -> None:
    """Two answers of one step each from a base (0.3, 0.7). theta = (0.6, 0.4) is base exp(A / beta) for A = beta log(theta / base), which
    is normalised: loss and gradient are 0 there, and the metrics say so."""
    theta, base = (torch.tensor(p, dtype=torch.float64).log() for p in ([0.6, 0.4], [0.3, 0.7]))
    batch = [make(theta[i : i + 1], base[i : i + 1], advantages=float(0.2 * (theta - base)[i])) for i in range(2)]
    outcome = evaluate(stack("direct_advantage", {"beta": 0.2}), batch)
    assert outcome.loss == pytest.approx(0, abs=1e-15)
    assert [float(g) for g in outcome.grads] == pytest.approx([0, 0], abs=1e-12)
    assert outcome.metrics["direct_advantage/residual_abs"] == pytest.approx(0, abs=1e-12)
    assert outcome.metrics["direct_advantage/log_ratio_abs"] == pytest.approx((math.log(2) + math.log(7 / 4)) / 2)


def test_direct_advantage_adds_up_to_one_square_a_step() -> None:
    """Steps of one and three tokens: 1/2 (0.1 - 1)^2 and 1/2 (0.6 + 2)^2, whatever their lengths; mean over one answer."""
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    advantages, turns = torch.tensor([1.0, -2.0, -2.0, -2.0], dtype=torch.float64), torch.tensor([0, 1, 1, 1])
    s = make(old + torch.tensor([0.1, 0.2, 0.1, 0.3]), old, advantages=advantages, turns=turns)
    outcome = evaluate(stack("direct_advantage"), [s])
    assert outcome.loss == pytest.approx(0.81 / 2 + 2.6**2 / 2)
    assert outcome.grads[0].tolist() == pytest.approx([-0.9, 2.6, 2.6, 2.6])
    assert outcome.metrics["direct_advantage/residual_abs"] == pytest.approx((0.9 + 2.6) / 2)
