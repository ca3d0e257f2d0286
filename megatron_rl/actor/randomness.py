"""Every random state of this process that training may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def random_states() -> dict[str, Any]:
    """Python's, numpy's, torch's, the device's, and Megatron's per-region generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is what other packages draw from
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """What `random_states` returned, put back."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["device"])
    get_cuda_rng_tracker().set_states(states["tracker"])
