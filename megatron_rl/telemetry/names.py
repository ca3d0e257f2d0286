"""Every name in metrics.jsonl, with its unit and what it says: the table behind docs/metrics.md and under the report's curves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class MetricName:
    """One row; `{...}` in the name stands for several."""

    name: str
    unit: str
    meaning: str

    def matches(self, name: str) -> bool:
        """Whether `name` is one of those."""
        return _pattern(self.name).fullmatch(name) is not None


PLACES = {"method": "[a-z0-9_]+", "layer": r"\d{2,}", "flips": r"\d+(?:-\d+|\+)?", "phase": "[a-z -]+"}
"""What placeholders stand for."""


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", name)
    return re.compile("".join(f"(?:{PLACES[part]})" if i % 2 else re.escape(part) for i, part in enumerate(parts)))


def find_metric(name: str) -> MetricName | None:
    """The row of a name; None where the table has none."""
    return next((row for _, rows in SECTIONS for row in rows if row.matches(name)), None)


def _rows(text: str) -> tuple[MetricName, ...]:
    """From lines of `name | unit | meaning`."""
    return tuple(MetricName(*(cell.strip() for cell in line.split("|", 2))) for line in text.strip().splitlines())


def _agreement(prefix: str) -> str:
    """What is said of any two routings."""
    return f"""
{prefix}/exact | share | of token-layers whose two sets of experts are equal
{prefix}/overlap | share | of the experts of a token-layer that both sets hold
{prefix}/jaccard | share | experts in both sets over those in either
{prefix}/token_mismatch_share | share | of tokens with another set in at least one layer
{prefix}/layer_mismatch_share | share | of token-layers with another set
{prefix}/first_divergent_layer | layer | mean number (from 1, dense layers too) of the shallowest layer that differs, over tokens with one
{prefix}/margin_at_flips | nats | mean log-score of the last chosen expert less that of the best one left out, where sets differ
{prefix}/margin_elsewhere | nats | the same where they are equal
{prefix}/load_violation_live | ratio | largest load of an expert over the mean, less 1, by the router's own choice; mean over layers
{prefix}/load_violation_given | ratio | the same by the routes compared with"""


SECTIONS: tuple[tuple[str, tuple[MetricName, ...]], ...] = (
    (
        "The run",
        _rows("""
step | count | rollout steps done when the line was written
time | s | of running so far, over all starts
reward/mean | reward | mean of the step's answers
reward/std | reward | standard deviation over the step's answers
response/length | tokens | mean sampled tokens an answer
response/truncated_share | share | of answers that reached rollout.max_new_tokens
lag/mean | versions | weight versions between a sampled token and now, mean a token
sampling/kept_mass | probability | mean mass that truncated sampling left to choose from
eval/pass_rate | share | of held-out prompts whose one sampled answer has reward 1
eval/greedy_pass_rate | share | of held-out prompts whose greedy answer has reward 1
weight_version | count | version of the weights that servers hold after the step
tokens_per_second | tokens/s | sampled tokens over the whole step
seconds/step | s | wall clock of the step
seconds/{phase} | s | of one phase of it; phases inside another are taken out of it
"""),
    ),
    (
        "The optimizer step",
        _rows("""
loss | nats | mean over the step's mini-batches
grad_norm | L2 | global norm before clipping, mean over the mini-batches
clipped_gradient_norm | L2 | of the part of the gradient that a method clips (sorl)
lr | 1 | learning rate of the last mini-batch
entropy | nats | of the policy, mean a token; logged with objective.entropy
"""),
    ),
    (
        "Trainer against engine: d = log trainer - log engine of a sampled token",
        _rows("""
mismatch/mean_abs_trained | nats | mean of abs d with old log-probs, over everything trained on
mismatch/k3_trained | nats | mean of e^d - 1 - d of the same
mismatch/max_abs_trained | nats | largest abs d of the same
mismatch/mean_abs_replay | nats | mean of abs d on the probed answers, engine's routes replayed
mismatch/k3_replay | nats | mean of e^d - 1 - d there
mismatch/max_abs_replay | nats | largest abs d there
mismatch/mean_abs_live | nats | mean of abs d on the probed answers, routed live
mismatch/k3_live | nats | mean of e^d - 1 - d there
mismatch/max_abs_live | nats | largest abs d there
bounds/classical | reward | bound on the surrogate's error by the largest divergence: 2 T(T-1) in front (papers: TRM)
bounds/pinsker_marginal_kl | reward | Pinsker-marginal bound by KL
bounds/pinsker_marginal_tv | reward | Pinsker-marginal bound by total variation
bounds/mixed_kl | reward | mixed bound by KL
bounds/mixed_tv | reward | mixed bound by total variation
bounds/coupling | reward | coupling bound
bounds/adaptive_kl | reward | adaptive bound by KL
bounds/adaptive_tv | reward | adaptive bound by total variation
bounds/adaptive | reward | the smaller of the adaptive bounds
"""),
    ),
    (
        "Routing: the trainer's own pass against the engine's routes",
        _rows(
            _agreement("routing")
            + """
routing/exact/layer_{layer} | share | routing/exact of one MoE layer, counted from 0
routing/overlap/layer_{layer} | share | routing/overlap of one MoE layer
routing/jaccard/layer_{layer} | share | routing/jaccard of one MoE layer
routing/abs_d/flips_{flips} | nats | mean of abs d, routed live, of tokens that so many layers route otherwise
routing/prefix_drift/flips_{flips} | nats | mean of abs (sum of d up to a token), by so many flips in the same prefix
routing/unreplayable_share | share | of rows marked as chosen by other weights than their token's; they are routed live
"""
        ),
    ),
    ("Routing: what routers would choose behind layers that take the engine's routes", _rows(_agreement("routing/replayed"))),
    (
        "Routing: after the step's updates against before",
        _rows(
            _agreement("routing/moved")
            + """
routing/moved/gamma | 1 | mean over tokens of e^-shift, RSPO's trust without its floor; shift: mean abs log-score change of old experts
routing/moved/shift_max | nats | largest shift of a token
"""
        ),
    ),
    (
        "The critic and what acts around the loss",
        _rows("""
critic/loss | loss | of the value model, mean over the mini-batches
critic/grad_norm | L2 | of the value model, before clipping
critic/explained_variance | share | of the returns' variance that values explain; 1 is perfect, below 0 worse than the mean
critic/clip_share | share | of tokens whose value moved beyond critic.clip
dynamic_sampling/rounds | count | batches of prompts drawn until enough groups were informative
popo/uninformative_share | share | of fresh groups whose rewards are all equal
popo/replaced_share | share | of groups that a stored one replaced
popo/expired_share | share | of stored groups that were too stale
popo/staleness_mean | versions | age of the groups that replaced others
popo/buffer_groups | count | groups stored, mean over leaders
length_lr/factor | 1 | what the schedule multiplies the learning rate by
vcpo/factor | 1 | what the schedule multiplies the learning rate by
vcpo/effective_share | share | effective sample size of the sequences' weights over their number
mipu/accepted | 0 or 1 | whether the step's weights were kept
mipu/forced | 0 or 1 | whether they were kept because too many in a row had been rejected
mipu/gap | reward | measured gap that decides
mipu/tolerance | reward | what it is held against
step_advantage/critic_error | loss | of the value model on step boundaries
"""),
    ),
    (
        "Methods, each under its own name (docs/methods/ has its formulas)",
        _rows("""
{method}/clip_share | share | of loss tokens whose gradient the clip takes away
{method}/clip_share_low | share | of them, at the lower bound
{method}/clip_share_high | share | of them, at the upper bound
{method}/dual_clip_share | share | of them, at the second clip of negative advantages
{method}/masked_share | share | of loss tokens that the objective leaves out
{method}/masked_share_positive | share | of them, with a positive advantage
{method}/masked_share_negative | share | of them, with a negative advantage
{method}/kept_share | share | of loss tokens that the correction keeps
{method}/kept_share_token | share | of them, by the rule for tokens alone
{method}/kept_share_sequence | share | of them, by the rule for sequences alone
{method}/accepted_share | share | of loss tokens that the draw accepts
{method}/above_share | share | of loss tokens above the upper bound
{method}/below_share | share | of loss tokens below the lower bound
{method}/outside_share | share | of loss tokens outside the restricted vocabulary
{method}/capped_share | share | of loss tokens whose weight is at its cap
{method}/effective_share | share | effective sample size of the weights over their number
{method}/weight_mean | 1 | mean weight a loss token
{method}/weight_square_mean | 1 | mean squared weight
{method}/ratio_mean | 1 | mean importance ratio
{method}/raw_mean | 1 | mean weight before normalisation
{method}/trust_mean | 1 | mean of gamma
{method}/allowance_mean | nats | mean divergence a token may still have
{method}/divergence_mean | nats | mean divergence a token, in the divergence chosen
{method}/deviation_mean | nats | mean deviation that is held against the thresholds
{method}/trace_mean | nats | mean of the decayed sum that is held against the threshold
{method}/second_moment | nats^2 | mean squared log-ratio
{method}/kl | nats | mean of the estimator a token
{method}/kl_mean | nats | mean of the estimator that is held against the bound
{method}/eps_mean | 1 | mean width of the clip
{method}/kept_mass_mean | probability | mean mass that the restricted vocabulary holds
{method}/pruned_mass_square_mean | probability^2 | mean squared mass outside of it
{method}/log_ratio_abs | nats | weighted mean of abs log-ratio to the base
{method}/residual_abs | nats | weighted mean of abs residual
{method}/nll | nats | mean negative log-likelihood a target token
"""),
    ),
)
