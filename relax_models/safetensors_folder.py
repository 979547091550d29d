"""The tensors of a Hugging Face folder: one safetensors file, or shards named by an index.

Every header is checked against its file's size before anything is read, and only what the index names is used.
Tensors are memory-mapped and read one at a time. Names and shapes are not judged here.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from relaxpack.errors import CheckpointError
from relaxpack.relax_models.contents import TensorInfo
from relaxpack.relax_models.json_files import read_object
from relaxpack.weight_format import FORMATS

INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_DTYPES = {"F32": ("f32", np.dtype(np.float32)), "F16": ("f16", np.dtype(np.float16)),
           "BF16": ("bf16", np.dtype(ml_dtypes.bfloat16))}
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class _Entry:
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    end: int


class SafetensorsFolder:
    """A `TensorSource`. Opening checks that every file is there and whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        weight_map = _named_by_index(folder)
        self.files = sorted(set(weight_map.values())) if weight_map is not None else _without_index(folder)
        self.extra_tensors: list[str] = []  # in a shard, but not named by the index
        self._check_present()
        self._entries: dict[str, _Entry] = {}
        damaged: list[str] = []
        for file in self.files:
            try:
                self._add(file, _read_header(folder / file), weight_map)
            except _Damaged as problem:
                damaged.append(f"{file} ({problem})")
        if damaged:
            raise CheckpointError(f"damaged: {', '.join(damaged)}; incomplete download? Fetch the files again")
        lost = sorted(set(weight_map or ()) - set(self._entries))
        if lost:
            raise CheckpointError(f"{INDEX} says that {weight_map[lost[0]]} holds {lost[0]!r}, "  # type: ignore[index]
                                  f"but it does not ({len(lost)} such tensors); index and shards do not match")
        self._maps: dict[str, mmap.mmap] = {}

    def _check_present(self) -> None:
        missing = [file for file in self.files if not (self.folder / file).is_file()]
        if missing:
            raise CheckpointError(f"missing: {', '.join(missing)} ({len(missing)} of {len(self.files)} weight files of "
                                  f"{self.folder.name}); incomplete download? Fetch the files again")

    def _add(self, file: str, entries: dict[str, _Entry], weight_map: dict[str, str] | None) -> None:
        for name, entry in entries.items():
            if weight_map is not None and weight_map.get(name) != file:
                self.extra_tensors.append(f"{file}: {name}")
            elif name in self._entries:
                raise CheckpointError(f"{name!r} is in both {self._entries[name].file} and {file}; an index "
                                      f"({INDEX}) must say which one counts")
            else:
                self._entries[name] = entry

    @property
    def bytes(self) -> int:
        return sum((self.folder / file).stat().st_size for file in self.files)

    def stored(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """name -> dtype (as safetensors calls it) and shape, of every tensor that counts."""
        return {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}

    def infos(self, names: Iterable[str] | None = None) -> dict[str, TensorInfo]:
        """Of these tensors, or of all. Raises CheckpointError for a dtype that is not a plain float."""
        infos = {}
        for name in self._entries if names is None else names:
            entry = self._entries[name]
            if entry.dtype not in _DTYPES:
                hint = ("config.json has no quantization_config that says how fp8 weights are scaled"
                        if entry.dtype == "F8_E4M3" else "quantised weights are read of fp8, AWQ, GPTQ and GGUF models")
                raise CheckpointError(f"{entry.file}: {name} is stored as {entry.dtype}; supported: "
                                      f"{', '.join(_DTYPES)} ({hint})")
            infos[name] = TensorInfo(name, entry.shape, FORMATS[_DTYPES[entry.dtype][0]])
        return infos

    def names(self) -> list[str]:
        return list(self._entries)

    def bytes_of(self, name: str) -> np.ndarray:
        """A tensor's bytes as uint8, a read-only view of the mapped file."""
        entry = self._entries[name]
        if entry.file not in self._maps:
            with open(self.folder / entry.file, "rb") as handle:
                self._maps[entry.file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._maps[entry.file], np.uint8, entry.end - entry.start, entry.start)

    def read(self, name: str) -> np.ndarray:
        """A read-only view of the mapped file, or a copy where the file is not aligned for its dtype."""
        entry = self._entries[name]
        data = self.bytes_of(name).view(_DTYPES[entry.dtype][1]).reshape(entry.shape)
        return data if data.flags.aligned else data.copy()

    def same_bytes(self, one: str, other: str) -> bool:
        """Equal dtype, shape and bytes."""
        a, b = self._entries[one], self._entries[other]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and equal_in_chunks(self.bytes_of(one), self.bytes_of(other))


def equal_in_chunks(one: np.ndarray, other: np.ndarray, chunk: int = 1 << 24) -> bool:
    """uint8 vectors; stops at the first difference, so that large files are not paged in whole."""
    return len(one) == len(other) and all(
        np.array_equal(one[i:i + chunk], other[i:i + chunk]) for i in range(0, len(one), chunk))


def _named_by_index(folder: Path) -> dict[str, str] | None:
    """tensor name -> shard, or None without an index."""
    if not (folder / INDEX).is_file():
        return None
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX} has no weight_map; incomplete download?")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{INDEX}: {name!r} is in {file!r}, which is not a file name in the same folder")
    return weight_map


def _without_index(folder: Path) -> list[str]:
    """The only candidate set of files: one file, or all shards of one numbered series."""
    series: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        match = _SHARD.fullmatch(path.name)
        series.setdefault(f"{match[1]}-*-of-{match[3]}.safetensors" if match else path.name, []).append(path.name)
    if not series:
        if any(folder.glob("adapter_config.json")):
            raise CheckpointError(f"{folder.name} is an adapter (LoRA), not a model; merge it into its base model")
        pickled = sorted(p.name for p in folder.glob("*.bin"))
        hint = (f"; {pickled[0]} is in PyTorch's pickle format, which is not read: save the model with "
                "safe_serialization=True" if pickled else "; incomplete download?")
        raise CheckpointError(f"{folder.name} has no safetensors file{hint}")
    if len(series) > 1:
        raise CheckpointError(f"{folder.name} has several sets of weights and no {INDEX} to choose: "
                              f"{', '.join(series)}. Remove all but one")
    (label, files), = series.items()
    if "*" in label:
        prefix, count = label.split("-*-of-")[0], int(label.split("-of-")[1][:5])
        return [f"{prefix}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    return files


class _Damaged(Exception):
    pass


def _read_header(path: Path) -> dict[str, _Entry]:
    """Layout: u64 header length, JSON header, tensor data; offsets count from the end of the header."""
    size = path.stat().st_size
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if size < 8 or length > size - 8 or length > _HEADER_LIMIT:
            raise _Damaged(f"its header claims {length} bytes, the file has {size}")
        try:
            header = json.loads(handle.read(length))
        except (ValueError, RecursionError):
            raise _Damaged("its header is not JSON") from None
    if not isinstance(header, dict):
        raise _Damaged("its header is not a JSON object")
    header.pop("__metadata__", None)
    entries, data_end = {}, 8 + length
    for name, value in header.items():
        entries[name] = entry = _entry(path.name, name, value, 8 + length)
        data_end = max(data_end, entry.end)
    if data_end != size:
        raise _Damaged(f"its tensors need {data_end} bytes, the file has {size}")
    return entries


_ITEM_SIZE = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
              "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1}


def _entry(file: str, name: str, value: Any, base: int) -> _Entry:
    try:
        dtype, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        whole = isinstance(dtype, str) and all(isinstance(n, int) and n >= 0 for n in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise _Damaged(f"the header entry of {name!r} is malformed")
    count = 1
    for n in shape:
        count *= n
    if dtype in _ITEM_SIZE and end - start != count * _ITEM_SIZE[dtype]:
        raise _Damaged(f"{name!r} of shape {list(shape)} {dtype} has {end - start} bytes")
    return _Entry(file, dtype, shape, base + start, base + end)
