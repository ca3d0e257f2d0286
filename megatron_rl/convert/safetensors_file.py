"""One safetensors file read with plain reads, so that what was read once and given back takes no memory.

The library's own handles map the file, and every page of it that was touched counts as the process's until the end.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .layouts import Shape, raw

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""As safetensors calls them."""


class SafetensorsFile:
    """The tensors of one file. The library checks the header: that names are unique, and values fill the file without gaps.

    Raises (on construction):
        ValueError: the header is damaged, or the file is not as long as it says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            raise ValueError(f"{path}: is damaged or truncated ({error}); copy the checkpoint again") from error
        self._file = path.open("rb", buffering=0)
        length = int.from_bytes(os.pread(self._file.fileno(), 8, 0), "little")
        header: dict[str, Any] = json.loads(os.pread(self._file.fileno(), length, 8))
        header.pop("__metadata__", None)
        self._start, self._entries = 8 + length, header

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> Shape:
        """From the header."""
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> str:
        """As safetensors calls it, from the header."""
        return str(self._entries[name]["dtype"])

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or with `index` only its row of that number (without the first axis).

        Raises:
            ValueError: its dtype is none that torch has, or the file has become shorter.
        """
        entry, shape = self._entries[name], self.shape(name)
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{self.path}: tensor {name} is in {entry['dtype']}, which is not supported")
        at = self._start + entry["data_offsets"][0]
        if index is not None:
            shape = shape[1:]
            at += index * math.prod(shape) * DTYPES[entry["dtype"]].itemsize
        tensor = torch.empty(shape, dtype=DTYPES[entry["dtype"]])
        if tensor.numel():
            self._read(raw(tensor), at, name)
        return tensor

    def _read(self, buffer: memoryview, at: int, name: str) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file.fileno(), [buffer[done:]], at + done)
            if not count:
                raise ValueError(f"{self.path}: ends within tensor {name}; copy the checkpoint again")
            done += count
