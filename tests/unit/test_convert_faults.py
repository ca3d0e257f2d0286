"""Conversions that go wrong: a clear error, nothing that loads by mistake, and the next run goes on where this one ended.

Faults are real ones: bytes changed in files, the kernel's file size limit, SIGKILL. Conversions run in this process.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.convert.commands import hf_to_mcore, mcore_to_hf
from megatron_rl.convert.hf import INDEX, HfReader, HfWriter
from megatron_rl.convert.inspection import compare
from megatron_rl.convert.mcore_reader import INDEX as MCORE_INDEX
from megatron_rl.convert.partial import ALIGNMENT, ORIGIN, PIECE_BYTES, whole_file
from megatron_rl.convert.reshard import reshard
from megatron_rl.convert.session import is_checkpoint
from tools.make_tiny_moe import TinyModel, make_tiny_moe

SIZES = TinyModel(vocab=384, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=4, topk=2, ffn=24)
"""About 0.2 MB in float32."""
FILE_BYTES = 16_000
"""A dozen files of it; the embedding alone, 49,152 bytes, is larger."""
DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Hugging Face folder in one file."""
    return make_tiny_moe(tmp_path_factory.mktemp("hf") / "model", SIZES)


@pytest.fixture(scope="module")
def checkpoint(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole Megatron checkpoint of it."""
    return hf_to_mcore(str(model), str(tmp_path_factory.mktemp("mcore") / "out"), file_bytes=FILE_BYTES)


def copied(folder: Path, target: Path) -> Path:
    """A copy to damage."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Writes the weights again after `edit`."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def flip(file: Path, at: int) -> None:
    """Changes one byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(bytes(data))


def duplicate(folder: Path) -> None:
    """A second file holds one of the tensors again."""
    tensors = load_file(folder / "model.safetensors")
    save_file({DOWN: tensors[DOWN]}, folder / "more.safetensors")
    weight_map = dict.fromkeys(tensors, "model.safetensors") | {"model.norm.weight": "more.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change(f, lambda t: t[DOWN].view(-1).__setitem__(7, float("nan"))), f"tensor {DOWN} has values that are not finite"),
        (lambda f: change(f, lambda t: t.pop(DOWN)), f"tensor {DOWN} is missing"),
        (
            lambda f: change(f, lambda t: t.update({DOWN: t[DOWN].T.contiguous()})),
            f"tensor {DOWN} has shape (24, 32), but config.json makes",
        ),
        (duplicate, f"tensor '{DOWN}' is in both model.safetensors and more.safetensors; remove one"),
        (lambda f: flip(f / "model.safetensors", 9), "model.safetensors: is damaged or truncated"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]), "is damaged or truncated"),
    ],
    ids=["corrupted", "missing", "mis-shaped", "duplicated", "header", "truncated"],
)
def test_a_damaged_folder_is_named_and_nothing_loads(model: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    folder, out = copied(model, tmp_path / "model"), tmp_path / "out"
    damage(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        hf_to_mcore(str(folder), str(out))
    assert not out.exists()
    assert not is_checkpoint(tmp_path / ".out.partial"), "what was written so far is no checkpoint"


def truncate_last(folder: Path) -> None:
    """The last file loses its end, which the index counts on."""
    last = max(folder.glob("*.distcp"), key=lambda file: int(file.stem.rpartition("_")[2]))
    last.write_bytes(last.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: flip(f / "__0_1.distcp", (f / "__0_1.distcp").stat().st_size // 2), "is damaged: its checksum is"),
        (lambda f: (f / "__0_3.distcp").unlink(), "__0_3.distcp: is missing, but the checkpoint's index names it"),
        (truncate_last, ".distcp: is truncated"),
        (lambda f: flip(f / ".metadata", 0), ".metadata: is damaged or of another version"),
        (lambda f: (f / ".metadata").unlink(), "has no .metadata: it is no Megatron distributed checkpoint"),
        (lambda f: (f / "state.json").unlink(), "is no whole checkpoint and holds none"),
    ],
    ids=["corrupted", "missing", "truncated", "index", "no index", "not whole"],
)
def test_a_damaged_checkpoint_is_named_and_nothing_loads(
    model: Path, checkpoint: Path, tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder, out = copied(checkpoint, tmp_path / "step_000000"), tmp_path / "out"
    damage(folder)
    with pytest.raises(ValueError, match=re.escape(message)):
        mcore_to_hf(str(folder), str(out), str(model))
    assert not out.exists()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        HfReader(tmp_path / ".out.partial")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """The kernel refuses to let a file grow beyond it, as it refuses any growth on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def kept(partial: Path, pattern: str) -> dict[str, int]:
    """The inode of every whole file: a file that is written again has another."""
    return {file.name: file.stat().st_ino for file in partial.rglob(pattern)}


@pytest.mark.parametrize("direction", ["hf-to-mcore", "mcore-to-hf"])
def test_a_full_disk_stops_and_the_next_run_goes_on(model: Path, checkpoint: Path, tmp_path: Path, direction: str) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    pattern = "*.distcp" if direction == "hf-to-mcore" else "*.safetensors"

    def convert() -> None:
        if direction == "hf-to-mcore":
            hf_to_mcore(str(model), str(out), file_bytes=FILE_BYTES)
        else:
            mcore_to_hf(str(checkpoint), str(out), str(model), file_bytes=FILE_BYTES)

    with file_size_limit(20_000), pytest.raises(RuntimeError, match="could not be written: File too large; the files that were finished"):
        convert()
    assert not out.exists() and kept(partial, pattern) == {}, "the embedding is first and larger than the limit"
    assert list(partial.rglob("*.writing")), "the file that was cut off has not got its name"
    convert()
    assert not partial.exists()
    if direction == "mcore-to-hf":
        assert list(compare(out, model)) == []
        assert (out / INDEX).is_file() and len(list(out.glob(pattern))) > 8


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process of its own that measures its memory, then converts until it is killed; and its folder."""
    folder = tmp_path_factory.mktemp("child")
    command = [sys.executable, str(Path(__file__).parent / "conversion_child.py"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process, folder
    finally:
        process.kill()
        process.communicate()


def test_one_tensor_at_a_time_is_in_memory(child: tuple[subprocess.Popen[str], Path]) -> None:
    process, _ = child
    assert process.stdout is not None
    found = json.loads(process.stdout.readline())
    # Twice the largest, and what sockets, plans and the allocator take.
    allowed = 2 * found["largest"] + (24 << 20)
    assert found["total"] > 2.5 * allowed, "a conversion that held the model, or a file of it, would show"
    for direction in ("hf_to_mcore", "mcore_to_hf", "reshard"):
        assert found[direction] < allowed, f"{direction}: {found}"


def test_a_killed_conversion_goes_on_and_ends_alike(child: tuple[subprocess.Popen[str], Path], model: Path) -> None:
    process, folder = child
    out, partial = folder / "out", folder / ".out.partial"
    deadline = time.monotonic() + 120
    while not (partial / "step_000000" / "__0_9.distcp").is_file():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was to be killed before its end"
    assert not out.exists() and not is_checkpoint(partial)
    before = kept(partial, "*.distcp")
    assert len(before) >= 9 and (partial / ORIGIN).is_file()
    step = hf_to_mcore(str(folder / "model"), str(out), file_bytes=1 << 20)
    after = kept(step, "*.distcp")
    again = [name for name in before if after[name] != before[name]]
    # The file whose journal was not yet written when the child died is written again.
    assert len(again) <= 1 and len(after) > len(before)
    assert not list(out.rglob("*.journal.json")) and not list(out.rglob(ORIGIN))
    mcore_to_hf(str(out), str(folder / "back"), str(folder / "model"))
    assert list(compare(folder / "back", folder / "model")) == []


def test_values_begin_at_multiples_of_their_alignment(checkpoint: Path, model: Path, tmp_path: Path) -> None:
    out = mcore_to_hf(str(checkpoint), str(tmp_path / "out"), str(model), file_bytes=FILE_BYTES)
    assert all(int.from_bytes(file.read_bytes()[:8], "little") % ALIGNMENT == -8 % ALIGNMENT for file in out.glob("*.safetensors"))
    stretches = pickle.loads((checkpoint / MCORE_INDEX).read_bytes()).storage_data.values()
    assert all(stretch.offset % ALIGNMENT == 0 for stretch in stretches)


@pytest.mark.parametrize("size", [0, PIECE_BYTES, 2 * PIECE_BYTES + 3])
def test_a_file_takes_any_number_of_bytes_at_once(size: int, tmp_path: Path) -> None:
    content = random.Random(0).randbytes(size)
    with whole_file(tmp_path / "file") as file:
        assert file.write(memoryview(content)) == size
    assert (tmp_path / "file").read_bytes() == content


def test_another_source_starts_afresh(model: Path, tmp_path: Path) -> None:
    folder, out, partial = copied(model, tmp_path / "model"), tmp_path / "out", tmp_path / ".out.partial"
    with file_size_limit(60_000), pytest.raises(RuntimeError, match="could not be written"):
        hf_to_mcore(str(folder), str(out))  # one file of 0.2 MB
    assert partial.exists()
    change(folder, lambda t: t[DOWN].mul_(2))
    step = hf_to_mcore(str(folder), str(out))
    mcore_to_hf(str(step), str(tmp_path / "back"), str(folder))
    assert list(compare(tmp_path / "back", folder)) == [], "nothing of the first source is left"


def test_optimizer_state_that_cannot_come_along_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    """The checkpoint says that it has some, and has none."""
    folder = copied(checkpoint, tmp_path / "step_000000")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"has_optimizer": True}))
    message = f"Megatron cannot bring the optimizer state of '{folder}' to one rank each .* pass --weights_only true"
    with pytest.raises(ValueError, match=message):
        reshard(str(folder), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert is_checkpoint(reshard(str(folder), str(tmp_path / "out"), weights_only=True))


def test_a_failed_writer_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    """HfWriter, which training and upcycling use, has nothing to go on with: it removes what it wrote."""
    tensors = load_file(model / "model.safetensors")

    def write() -> None:
        with HfWriter(tmp_path / "out", model) as writer:
            for name, tensor in tensors.items():
                writer.add(name, tensor)

    with file_size_limit(60_000), pytest.raises(Exception, match="File too large"):
        write()
    assert list(tmp_path.iterdir()) == []
