"""transformers' opinion of a trajectory: the same tokens, the same weights, another implementation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rl.types import Trajectory


class Oracle:
    """A Hugging Face model in fp32."""

    def __init__(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if weights is not None:
            with torch.no_grad():
                self._load(weights)

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        """Weights under the names of the file; transformers 5 holds the experts of a layer in two tensors, gate over up and down."""
        state = self.model.state_dict()
        for name, tensor in weights.items():
            if ".experts." not in name:
                state[name].copy_(tensor)
                continue
            prefix, number, kind, _ = name.rsplit(".", 3)
            if kind == "down_proj":
                state[f"{prefix}.down_proj"][int(number)].copy_(tensor)
            else:
                half = tensor.shape[0] * (kind == "up_proj")
                state[f"{prefix}.gate_up_proj"][int(number), half : half + tensor.shape[0]].copy_(tensor)

    def log_probs(self, trajectory: Trajectory) -> NDArray[np.float32]:
        """[N] log-prob of each sampled token at temperature 1, NaN for the prompt."""
        tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
        with torch.no_grad():
            logits = self.model(tokens).logits[0, :-1].float()
        picked = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
        found = np.full(len(trajectory.tokens), np.nan, dtype=np.float32)
        found[1:] = picked.numpy()
        return np.where(trajectory.loss_mask, found, np.nan).astype(np.float32)

    def routes(self, trajectory: Trajectory) -> NDArray[np.int64]:
        """[N - 1, L, K] experts of each input token, sorted by id."""
        tokens = torch.from_numpy(trajectory.tokens[:-1].astype(np.int64))[None]
        with torch.no_grad():
            out = self.model(tokens, output_router_logits=True)
        top_k = self.model.config.num_experts_per_tok
        picked = [logits.reshape(len(trajectory.tokens) - 1, -1).topk(top_k, dim=-1).indices for logits in out.router_logits]
        return torch.stack(picked, dim=1).sort(-1).values.numpy()
