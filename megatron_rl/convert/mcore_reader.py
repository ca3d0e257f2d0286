"""Megatron distributed checkpoints read by rectangle: any part of any tensor, whatever layout wrote it, without building a model.

The format is torch's (torch.distributed.checkpoint): an index names, for each rectangle that a rank wrote, a file and a stretch of it,
which holds one tensor as torch.save writes it. The stretch's own checksum is compared with what was read.
"""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from .layouts import Shape, raw

INDEX = ".metadata"
_LOCAL_HEADER = 30
"""Bytes of a zip entry's header before its name."""


class McoreReader:
    """The tensors of a checkpoint by key. The index is a pickle, as Megatron and torch write it: open only what you trust.

    Raises (on construction):
        ValueError: no index, a damaged one, or a file that is missing or shorter than the index says.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        metadata = _read_index(self.folder)
        self._tensors = {key: of for key, of in metadata.state_dict_metadata.items() if isinstance(of, TensorStorageMetadata)}
        self._chunks = {key: {tuple(c.offsets): tuple(c.sizes) for c in of.chunks} for key, of in self._tensors.items()}
        self._stored = metadata.storage_data
        self._files: dict[str, IO[bytes]] = {}
        self._check_files()

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for info in self._stored.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        for name, size in sorted(needed.items()):
            file = self.folder / name
            if not file.is_file():
                raise ValueError(f"{file}: is missing, but the checkpoint's index names it; copy the checkpoint again")
            if file.stat().st_size < size:
                raise ValueError(f"{file}: is truncated: {file.stat().st_size} bytes of at least {size}; copy the checkpoint again")

    def keys(self) -> set[str]:
        """Every tensor there is, those of the optimizer too."""
        return set(self._tensors)

    def size(self, key: str) -> Shape:
        """The whole tensor's; experts, and layers where all are alike, are leading axes."""
        return tuple(self._tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        """As it is stored."""
        return self._tensors[key].properties.dtype

    def check(self, key: str, whole: Shape, *, padded: bool) -> None:
        """Raises ValueError unless there is a tensor `key` of that shape; of any where it is `padded`, as Megatron pads the vocabulary."""
        if key not in self._tensors:
            raise ValueError(f"{self.folder}: tensor {key} is missing; config.json is of another model, or the checkpoint is damaged")
        if self.size(key) != whole and not padded:
            raise ValueError(f"{self.folder}: tensor {key} has shape {self.size(key)}, but config.json makes it {whole}")

    def pieces(self, key: str) -> int:
        """How many rectangles it is stored in."""
        return len(self._chunks[key])

    def total_bytes(self) -> int:
        """Size of the files with tensors."""
        return sum((self.folder / name).stat().st_size for name in {info.relative_path for info in self._stored.values()})

    def read(self, key: str, offset: Shape, out: Tensor) -> None:
        """Fills `out` with the rectangle of `key` that starts at `offset` and has out's shape. Beyond the tensor's end, out stays.

        Args:
            out: contiguous, of the stored dtype.

        Raises:
            ValueError: the rectangle is not stored whole, or what is stored is damaged.
        """
        assert out.is_contiguous() and out.dtype == self.dtype(key)
        if self._chunks[key].get(offset) == tuple(out.shape):
            self._load(key, offset, out)
            return
        filled = 0
        for start, size in self._chunks[key].items():
            low = [max(a, b) for a, b in zip(offset, start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offset, out.shape, start, size, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            chunk = torch.empty(size, dtype=out.dtype)
            self._load(key, start, chunk)
            _window(out, low, high, offset).copy_(_window(chunk, low, high, start))
            filled += _area(low, high)
        wanted = _area(offset, [min(a + n, end) for a, n, end in zip(offset, out.shape, self.size(key), strict=True)])
        if filled != wanted:
            raise ValueError(f"{self.folder}: of tensor {key} from {offset}, {wanted - filled} of {wanted} elements are missing")

    def _load(self, key: str, offset: Shape, out: Tensor) -> None:
        """One stored rectangle, straight into `out`."""
        info = self._stored[MetadataIndex(key, offset)]
        if info.relative_path not in self._files:
            self._files[info.relative_path] = (self.folder / info.relative_path).open("rb", buffering=0)
        file = self._files[info.relative_path]
        where = f"{self.folder / info.relative_path}: tensor {key} at {offset}"
        try:
            start, size, checksum = _record(file, info.offset, info.length)
        except (zipfile.BadZipFile, OSError) as error:
            raise ValueError(f"{where} is damaged ({error}); copy the checkpoint again") from error
        if size != out.numel() * out.element_size():
            raise ValueError(f"{where} has {size} bytes, but its shape {tuple(out.shape)} in {out.dtype} makes it {out.nbytes}")
        buffer = raw(out)
        got = 0
        while got < size:
            count = os.preadv(file.fileno(), [buffer[got:]], start + got)
            if not count:
                raise ValueError(f"{where} is truncated; copy the checkpoint again")
            got += count
        if zlib.crc32(buffer) != checksum:
            raise ValueError(f"{where} is damaged: its checksum is {zlib.crc32(buffer):08x}, not {checksum:08x}; copy the checkpoint again")


def _read_index(folder: Path) -> Any:
    file = folder / INDEX
    if not file.is_file():
        raise ValueError(f"{folder}: has no {INDEX}: it is no Megatron distributed checkpoint (torch_dist), or was not written to the end")
    try:
        return pickle.loads(file.read_bytes())
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
        raise ValueError(f"{file}: is damaged or of another version ({error}); copy the checkpoint again") from error


class _Stretch:
    """A stretch of a file, as the seekable file that zipfile wants."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seek(self, to: int, whence: int = os.SEEK_SET) -> int:
        self._at = to + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = os.pread(self._file.fileno(), left if count < 0 else min(count, left), self._start + self._at)
        self._at += len(data)
        return data


def _record(file: IO[bytes], start: int, length: int) -> tuple[int, int, int]:
    """Where in the file the values of the tensor that torch.save wrote lie: their start, their bytes, their CRC-32."""
    with zipfile.ZipFile(_Stretch(file, start, length)) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
        if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile("it holds no single tensor")
        (entry,) = entries
    header = os.pread(file.fileno(), _LOCAL_HEADER, start + entry.header_offset)
    if header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile("its header is gone")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    return start + entry.header_offset + _LOCAL_HEADER + name + extra, entry.file_size, entry.CRC


def _window(tensor: Tensor, low: Sequence[int], high: Sequence[int], origin: Shape) -> Tensor:
    """The part of `tensor`, which begins at `origin`, between two corners."""
    return tensor[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))]


def _area(low: Sequence[int], high: Sequence[int]) -> int:
    area = 1
    for a, b in zip(low, high, strict=True):
        area *= max(0, b - a)
    return area
