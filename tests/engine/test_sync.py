"""New weights in a running server, both ways, against transformers with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl.config import ModelConfig, SyncConfig
from megatron_rl.rollout.client import EngineError
from megatron_rl.rollout.collector import Sampling, collect
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.sync.control import WeightSync, WeightUpdateError
from megatron_rl.sync.disk import DiskSync
from megatron_rl.sync.distributed import DistributedSync
from tests.engine.oracle import Oracle
from tests.engine.test_rollout import make_prompts

pytestmark = pytest.mark.engine

Opener = Callable[[Fleet, SyncConfig, Path, Path], WeightSync]
ALWAYS = SyncConfig(verify="always", bucket_mb=1.0)
"""1 MB makes five buckets of the 4.5 MB."""


def open_distributed(fleet: Fleet, config: SyncConfig, _model: Path, _folder: Path) -> WeightSync:
    return DistributedSync(fleet, config, dtype=torch.float32, device=torch.device("cpu"), experts=8)


def open_disk(fleet: Fleet, config: SyncConfig, model: Path, folder: Path) -> WeightSync:
    return DiskSync(fleet, config, model_path=model, folder=folder, dtype=torch.float32, experts=8)


@pytest.fixture(scope="module")
def base(tiny_moe: Path) -> dict[str, Tensor]:
    return load_file(tiny_moe / "model.safetensors")


@pytest.fixture
def fleet(engine: Fleet, base: dict[str, Tensor], tiny_moe: Path, tmp_path: Path) -> Iterator[Fleet]:
    """The shared server through a fleet of its own, which a test may quarantine; gets the first weights back as version 0."""
    model = ModelConfig(path=str(tiny_moe))
    with Fleet.connect(engine.urls, engine.config, model, routes=True) as own:
        yield own
    open_disk(engine, ALWAYS, tiny_moe, tmp_path / "restore").push(iter(base.items()), 0)


def moved(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Every weight a little elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    return {name: w + 0.02 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


@pytest.mark.parametrize("opener", [open_distributed, open_disk])
def test_outputs_become_those_of_the_new_weights(
    fleet: Fleet, base: dict[str, Tensor], tiny_moe: Path, tmp_path: Path, opener: Opener
) -> None:
    """Twice, because a group that was used once must work again. fp32 agrees to 1e-4; the old weights are 1e-1 away."""
    prompts, sampling = make_prompts(3), Sampling(1.0, 10)
    sync = opener(fleet, ALWAYS, tiny_moe, tmp_path / "sync")
    for version in (11, 12):
        weights = moved(base, version)
        collect(fleet, prompts, samples=1, sampling=sampling, routes=True, version=None)  # so that there are old keys to flush
        sync.push(iter(weights.items()), version)
        new, old = Oracle(tiny_moe, weights), Oracle(tiny_moe)
        for t in collect(fleet, prompts, samples=2, sampling=sampling, routes=True, version=version):
            assert t.versions[t.loss_mask].tolist() == [version] * t.response_tokens
            np.testing.assert_allclose(t.behaviour_logp, new.log_probs(t), atol=1e-4, rtol=0)
            np.testing.assert_array_equal(np.sort(t.routes, -1), new.routes(t))
            assert np.nanmax(np.abs(t.behaviour_logp - old.log_probs(t))) > 1e-2
    sync.close()


def test_only_two_folders_stay(fleet: Fleet, base: dict[str, Tensor], tiny_moe: Path, tmp_path: Path) -> None:
    sync = open_disk(fleet, SyncConfig(verify="never"), tiny_moe, tmp_path / "sync")
    for version in (21, 22, 23):
        sync.push(iter(base.items()), version)
    assert sorted(path.name for path in (tmp_path / "sync").iterdir()) == ["version_000022", "version_000023"]


def refuses_to_sample(fleet: Fleet) -> None:
    with pytest.raises(EngineError, match="must not be sampled from: weight update to version"):
        collect(fleet, make_prompts(1), samples=1, sampling=Sampling(), routes=True, version=None)


def test_a_weight_that_never_came_is_found(fleet: Fleet, base: dict[str, Tensor], tiny_moe: Path, tmp_path: Path) -> None:
    """SGLang takes what it gets and says success; only the checksums tell."""
    weights = {name: w for name, w in moved(base, 1).items() if name != "lm_head.weight"}
    sync = open_distributed(fleet, ALWAYS, tiny_moe, tmp_path)
    with pytest.raises(
        WeightUpdateError, match=rf"version 31 failed at step 'verify checksums': {fleet.urls[0]}: .*only one side.*lm_head"
    ):
        sync.push(iter(weights.items()), 31)
    refuses_to_sample(fleet)
    sync.close()


def test_a_refused_weight_names_server_and_step(fleet: Fleet, base: dict[str, Tensor], tiny_moe: Path, tmp_path: Path) -> None:
    weights = base | {"model.norm.weight": torch.ones(7)}
    sync = open_distributed(fleet, ALWAYS, tiny_moe, tmp_path)
    with pytest.raises(WeightUpdateError, match=rf"version 41 failed at step 'broadcast': {fleet.urls[0]}: .*Failed to update parameter"):
        sync.push(iter(weights.items()), 41)
    refuses_to_sample(fleet)
    sync.close()
    fleet.command("/end_weight_update", [{}], timeout=20).result()  # the shared server must take the next update
