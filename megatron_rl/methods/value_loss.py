"""What a critic is trained with. Evidence [C] for the square loss (1707.06347's code, verl), [D] for the cross-entropy (2412.18279).

    square  L_t = 1/2 max( (V_t - G_t)^2, (clip(V_t, Vold_t - clip, Vold_t + clip) - G_t)^2 )
            G: return, Vold: V at the start of the step
    bce     L_t = -G_t log sigmoid(z_t) - (1 - G_t) log(1 - sigmoid(z_t))
            G: probability of success, V = sigmoid(z)

Both are minimised over loss tokens; `objective.reduce_loss` with token-mean makes the scalar. Not a method of the catalog: it is not
stacked on a policy's loss, but the loss of a model of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..types import Metric, as_metric
from .objective import Surrogate

ValueForm = Literal["square", "bce"]


def value_of(output_T: Tensor, form: ValueForm) -> Tensor:
    """[T] the value that a head's output stands for: itself, or its sigmoid."""
    return output_T if form == "square" else output_T.sigmoid()


def value_loss(
    output_T: Tensor, old_value_T: Tensor | None, return_T: Tensor, mask_T: Tensor, form: ValueForm, clip: float | None = None
) -> Surrogate:
    """See the module's formula; 0 with a zero gradient where mask is False, whatever stands there.

    Args:
        output_T: the value head's output; carries the gradient.
        old_value_T: `value_of` it at the start of the step; only looked at by square with a clip.
        return_T: for bce in [0, 1].
        clip: of square: how far a value may move before the error stops pulling; None for no clip.

    Metrics: `clip_share`, and the moments that `explained_variance` needs.
    """
    output_T, return_T = (torch.where(mask_T, x if x.dtype == torch.float64 else x.float(), 0.0) for x in (output_T, return_T.detach()))
    clipped_T = torch.zeros_like(mask_T)
    if form == "bce":
        loss_T = torch.nn.functional.binary_cross_entropy_with_logits(output_T, return_T, reduction="none")
    else:
        loss_T = (output_T - return_T).square()
        if clip is not None:
            assert old_value_T is not None, "clipping needs the values at the start of the step"
            old_T = torch.where(mask_T, old_value_T.detach().to(output_T.dtype), 0.0)
            near_T = (output_T.clamp(min=old_T - clip, max=old_T + clip) - return_T).square()
            clipped_T = mask_T & (near_T > loss_T)
            loss_T = torch.maximum(loss_T, near_T)
        loss_T = loss_T / 2
    metrics = {"clip_share": as_metric(clipped_T.sum(), mask_T.sum()), **_moments(value_of(output_T, form), return_T, mask_T)}
    return Surrogate(torch.where(mask_T, loss_T, 0.0), metrics)


def _moments(value_T: Tensor, return_T: Tensor, mask_T: Tensor) -> dict[str, Metric]:
    """First and second moments of the residual and of the return, as pairs: they add up over micro-batches and ranks."""
    count, return_T = mask_T.sum(), return_T.double()
    residual_T = return_T - value_T.detach().double()
    named = {"residual": residual_T, "return": return_T}
    means = {f"{name}_mean": as_metric(torch.where(mask_T, x_T, 0.0).sum(), count) for name, x_T in named.items()}
    squares = {f"{name}_square": as_metric(torch.where(mask_T, x_T, 0.0).square().sum(), count) for name, x_T in named.items()}
    return means | squares


def explained_variance(moments: Mapping[str, float]) -> float:
    """1 - Var(G - V) / Var(G), from the reduced metrics of `value_loss`; NaN where all returns are equal."""
    residual = moments["residual_square"] - moments["residual_mean"] ** 2
    total = moments["return_square"] - moments["return_mean"] ** 2
    return 1 - residual / total if total > 0 else float("nan")
