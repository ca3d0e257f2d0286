"""Measurements on disk: what is loaded is what was saved, whole or refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.lab.records import Measurement
from tests.unit.lab_cases import made_up_measurement


def test_a_measurement_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = made_up_measurement()
    saved.save(tmp_path)
    loaded = Measurement.load(tmp_path)
    assert loaded.floor == saved.floor and loaded.meta == saved.meta
    for name, sample in saved.samples.items():
        again = loaded.samples[name]
        assert again.engine == sample.engine
        assert list(again.rescored) == list(sample.rescored), "the order of the grid stays"
        for before, after in [(sample.batch, again.batch), *zip(sample.rescored.values(), again.rescored.values(), strict=True)]:
            for f in dataclasses.fields(before):
                old, new = getattr(before, f.name), getattr(after, f.name)
                assert np.array_equal(old, new) if isinstance(old, np.ndarray) else old == new, f.name


def test_the_same_measurement_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        made_up_measurement().save(tmp_path / name)
    files = [{p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1] and len(files[0]) == 2


def test_a_new_measurement_replaces_the_old_one_and_leaves_no_arrays_behind(tmp_path: Path) -> None:
    made_up_measurement(seed=0).save(tmp_path)
    made_up_measurement(seed=1).save(tmp_path)
    assert Measurement.load(tmp_path).meta["seed"] == 1
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("keep", [0, 100, -1])
def test_arrays_that_were_cut_off_are_refused(tmp_path: Path, keep: int) -> None:
    made_up_measurement().save(tmp_path)
    (data,) = tmp_path.glob("*.npz")
    data.write_bytes(data.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"measurement-.*npz.*measure again"):
        Measurement.load(tmp_path)


def test_a_folder_without_a_measurement_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no measurement\.json; give the --out"):
        Measurement.load(tmp_path)


def test_arrays_of_wrong_length_are_named() -> None:
    sample = made_up_measurement().main
    with pytest.raises(ValueError, match="mu_T: 3 values where"):
        dataclasses.replace(sample.batch, mu_T=sample.batch.mu_T[:3])
    first = next(iter(sample.rescored.values()))
    with pytest.raises(ValueError, match="live: logp_T: 3 values for"):
        dataclasses.replace(sample, rescored={"live": dataclasses.replace(first, logp_T=first.logp_T[:3])})


def test_tokens_and_splits_follow_the_offsets() -> None:
    batch = made_up_measurement().main.batch
    assert [len(x) for x in batch.split(batch.mu_T)] == batch.lengths_S.tolist()
    tokens = batch.tokens(1)
    assert tokens[0] == batch.first_S[1]
    assert tokens[1:].tolist() == batch.label_T[batch.offsets_S[1] : batch.offsets_S[2]].tolist()
