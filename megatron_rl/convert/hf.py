"""Hugging Face checkpoint folders: reading safetensors one tensor at a time, and writing them whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from .partial import sync
from .safetensors_file import SafetensorsFile

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 1 << 30
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files that go with the weights unchanged."""


def read_config(folder: str | Path) -> dict[str, Any]:
    """`folder`/config.json.

    Raises:
        ValueError: it is not there or is no JSON object.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder}: has no config.json; give a folder with a Hugging Face checkpoint")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file}: holds no JSON object")
    return config


class HfReader:
    """The tensors of a checkpoint folder by name; only headers are read until a tensor is asked for.

    Raises (on construction):
        ValueError: no weights, a damaged or truncated file, a tensor that two files hold, or one that its file lacks.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config = read_config(folder)
        self._files = {name: _open(self.folder / name) for name in self._weight_files()}
        self._where: dict[str, str] = {}
        for file, handle in self._files.items():
            for tensor in handle.names():
                if tensor in self._where:
                    raise ValueError(f"{self.folder}: tensor {tensor!r} is in both {self._where[tensor]} and {file}; remove one")
                self._where[tensor] = file
        for tensor, file in self._index().items():
            if self._where.get(tensor) != file:
                raise ValueError(f"{self.folder}: {INDEX} says that {file} holds tensor {tensor!r}, but it does not")

    def _index(self) -> dict[str, str]:
        file = self.folder / INDEX
        if not file.is_file():
            return {}
        try:
            weight_map = json.loads(file.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: has no readable weight_map ({error})") from error
        return dict(weight_map)

    def _weight_files(self) -> list[str]:
        index = self._index()
        if index:
            return sorted(set(index.values()))
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.folder}: has no .safetensors file; other weight formats are not read")
        if len(files) > 1:
            raise ValueError(f"{self.folder}: has {len(files)} .safetensors files but no {INDEX} to say which belong to the model")
        return files

    def names(self) -> set[str]:
        """Every tensor there is."""
        return set(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return self._files[self._where[name]].shape(name)

    def dtype(self, name: str) -> str:
        """Dtype of a tensor as safetensors calls it (F32, BF16, F8_E4M3, ...), from the header."""
        return self._files[self._where[name]].dtype(name)

    def total_bytes(self) -> int:
        """Size of the weight files."""
        return sum((self.folder / file).stat().st_size for file in self._files)

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or with `index` only its row of that number (without the first axis)."""
        return self._files[self._where[name]].tensor(name, index)


def _open(file: Path) -> SafetensorsFile:
    if not file.is_file():
        raise ValueError(f"{file}: is missing, but {INDEX} names it; copy the checkpoint again")
    return SafetensorsFile(file)


class HfWriter:
    """Writes a checkpoint folder that appears only when it is whole.

    Use it as a context manager: leaving it normally writes the index and renames the folder into place; leaving it by an error
    removes what was written. At most one shard is held in host memory.

    Args:
        folder: must not exist yet.
        template: a checkpoint folder of the same model, whose config.json, generation config and tokenizer are copied.
        shard_bytes: largest file, unless one tensor alone is larger.

    Raises:
        ValueError: `folder` exists, or `template` has no config.json.
    """

    def __init__(self, folder: str | Path, template: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.template = Path(folder), Path(template)
        if self.folder.exists():
            raise ValueError(f"{folder}: exists already; remove it or choose another folder")
        self._config = read_config(template)
        self._shard_bytes = shard_bytes
        self._partial = self.folder.parent / f".{self.folder.name}.partial"
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._names: set[str] = set()
        self._dtypes: set[torch.dtype] = set()

    def __enter__(self) -> Self:
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            # After a rename there is nothing to remove.
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Appends a tensor, copied to host memory."""
        assert name not in self._names, f"{name} was written before"
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._names.add(name)
        self._dtypes.add(tensor.dtype)
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        save_file(self._pending, self._partial / shard_file(len(self._shards) + 1, 0), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _finish(self) -> None:
        if self._pending:
            self._flush()
        count = len(self._shards)
        assert count, "a checkpoint without tensors"
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, 1):
            final = shard_file(number, count)
            (self._partial / shard_file(number, 0)).rename(self._partial / final)
            weight_map |= dict.fromkeys(names, final)
        write_companions(self._partial, self.template, self._config, weight_map, self._total_bytes, self._dtypes)
        for path in self._partial.iterdir():
            sync(path)
        self._partial.rename(self.folder)
        sync(self.folder.parent)


def write_companions(
    folder: Path, template: Path, config: Mapping[str, Any], weight_map: Mapping[str, str], total_bytes: int, dtypes: set[torch.dtype]
) -> None:
    """Everything beside the weights: the index where there are several files, config.json, and what the template has of COMPANIONS.

    Args:
        weight_map: tensor -> its file.
        dtypes: of all tensors.
    """
    if len(set(weight_map.values())) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)})
    _write_json(folder / "config.json", _with_dtype(config, dtypes))
    for name in COMPANIONS:
        if (template / name).is_file():
            shutil.copyfile(template / name, folder / name)


def shard_file(number: int, count: int) -> str:
    """The name of the weight file with that number, from 1, of so many."""
    if count == 1:
        return "model.safetensors"
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _with_dtype(config: Mapping[str, Any], dtypes: set[torch.dtype]) -> dict[str, Any]:
    """config.json that says what the weights are, under the name its writer used (transformers 5: dtype, 4: torch_dtype).

    Weights are written plain, whatever the template's were; where some are in fp32 among others, the others' dtype is the model's.
    """
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    named = dtypes - {torch.float32} or dtypes
    if len(named) != 1:
        return plain
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**plain, key: str(next(iter(named))).removeprefix("torch.")}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
