"""Parameters as safetensors shards: a streaming writer and a memory-mapping reader. Neither ever holds two parameters
(tensors that end a shard, 1 MiB together, aside), and neither knows what a weight format is. Tensors that another stem
of the bundle holds already, byte for byte, are not written again.

The shards are plain safetensors files. Two habits make them good to map: the header is padded with spaces to a fixed
size, and a tensor whose size is not a multiple of 64 bytes is kept for the end of its shard, so all others start on a
64-byte boundary of the file, which is what TVM wants for taking memory without a copy.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from relaxpack.dist.integrity import parse_json
from relaxpack.dist.store import Store
from relaxpack.errors import DamagedMemberError, EnvironmentProblem

SHARD_BYTES = 1_000_000_000
HEADER_BYTES = 128 << 10      # with the 8 bytes of its length: a multiple of 64
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_TAIL_BYTES = 1 << 20
_DTYPES = {"bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
           "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
           "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_NAMES = {code: name for name, code in _DTYPES.items()}


def tensor_name(parameter: str, suffix: str) -> str:
    """Name of one packed buffer of a parameter: the parameter's own where there is one buffer (suffix "")."""
    return f"{parameter}.{suffix}" if suffix else parameter


def numpy_dtype(name: str) -> np.dtype:
    """dtype by name; bfloat16 and float8 come from ml_dtypes, which TVM itself needs."""
    if hasattr(np, name):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise EnvironmentProblem(f"parameters of dtype {name} need the package ml_dtypes: "
                                 "pip install ml_dtypes") from None
    return np.dtype(getattr(ml_dtypes, name))


def tensor_digest(array: np.ndarray) -> str:
    """SHA-256 of dtype, shape and bytes of a C-contiguous array."""
    digest = hashlib.sha256(f"{array.dtype.name} {list(array.shape)} ".encode())
    if array.nbytes:
        digest.update(_bytes(array))
    return digest.hexdigest()


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def shard_name(stem: str, index: int) -> str:
    return f"params/{stem}/{index:05d}.safetensors"


class ParamsWriter:
    """Streams parameters into shards under `folder`; use it through `BundleWriter.params`. Same calls, same bytes.

    `names` collects the tensor names in the order of adding; `members` the shards' member names; `digests` the SHA-256 of
    each tensor's dtype, shape and bytes. `known`: (name, digest) → stem that holds this tensor; such a tensor is noted in
    `shared` instead of written, and what is written here is added to it.
    """

    def __init__(self, folder: Path, stem: str, require_space: Callable[[int], None] = lambda size: None,
                 shard_bytes: int = SHARD_BYTES, known: dict[tuple[str, str], str] | None = None) -> None:
        self._folder, self.stem, self._shard_bytes = folder, stem, shard_bytes
        self._require_space = require_space
        self._known = {} if known is None else known
        self.names: list[str] = []
        self.digests: dict[str, str] = {}
        self.shared: dict[str, list[str]] = {}
        self.members: list[str] = []
        self._seen: set[str] = set()
        self._file: BinaryIO | None = None
        self._entries: dict[str, dict[str, object]] = {}
        self._tail: list[tuple[str, np.ndarray]] = []
        self._offset = self._tail_bytes = self._header_bytes = 0

    def add(self, name: str, buffers: Mapping[str, np.ndarray]) -> None:
        """One parameter: its packed buffers by suffix. Arrays are written at once and not kept (small tails aside)."""
        for suffix, array in buffers.items():
            self._add(tensor_name(name, suffix), np.asarray(array))

    def _add(self, name: str, array: np.ndarray) -> None:
        if name in self._seen:
            raise ValueError(f"parameter tensor {name} was added twice")
        if array.dtype.name not in _DTYPES or array.dtype.byteorder == ">":
            raise ValueError(f"parameter tensor {name} has dtype {array.dtype}; known are {', '.join(_DTYPES)}")
        self._seen.add(name)
        self.names.append(name)
        array = np.ascontiguousarray(array).reshape(array.shape)    # NumPy makes one dimension of none
        digest = self.digests[name] = tensor_digest(array)
        holder = self._known.setdefault((name, digest), self.stem)
        if holder != self.stem:
            self.shared.setdefault(holder, []).append(name)
            return
        header = len(json.dumps(name)) + 24 * array.ndim + 128    # an upper bound of its entry
        if self._file is not None and (self._offset + self._tail_bytes + array.nbytes > self._shard_bytes
                                       or self._header_bytes + header > HEADER_BYTES - 64):
            self._end_shard()
        if self._file is None:
            self._begin_shard()
        self._require_space(array.nbytes)
        self._header_bytes += header
        if array.nbytes % 64 == 0:
            self._write(name, array)
        elif self._tail_bytes + array.nbytes <= _TAIL_BYTES:
            self._tail.append((name, array.copy()))
            self._tail_bytes += array.nbytes
        else:
            self._write(name, array)
            self._end_shard()

    def _begin_shard(self) -> None:
        member = shard_name(self.stem, len(self.members) + 1)
        self.members.append(member)
        file = self._folder / member
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("xb")
        self._file.seek(HEADER_BYTES)
        self._entries, self._tail = {}, []
        self._offset = self._tail_bytes = self._header_bytes = 0

    def _write(self, name: str, array: np.ndarray) -> None:
        assert self._file is not None
        if array.nbytes:
            self._file.write(_bytes(array))
        end = self._offset + array.nbytes
        self._entries[name] = {"dtype": _DTYPES[array.dtype.name], "shape": list(array.shape),
                               "data_offsets": [self._offset, end]}
        self._offset = end

    def _end_shard(self) -> None:
        if self._file is None:
            return
        for name, array in self._tail:
            self._write(name, array)
        header = json.dumps(self._entries, separators=(",", ":"), ensure_ascii=False).encode()
        size = HEADER_BYTES - 8
        assert len(header) <= size, (len(header), size)
        if self._offset == 0:
            self._file.truncate(HEADER_BYTES)
        self._file.seek(0)
        self._file.write(size.to_bytes(8, "little") + header.ljust(size))
        self._file.close()
        self._file = None

    def close(self) -> None:
        """End the last shard. Idempotent."""
        self._end_shard()

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class ParamsReader:
    """The tensors of some shards. Arrays are views of privately mapped files: nothing is read before it is touched.
    They are writable only so that DLPack takes them; what is written stays in this process."""

    def __init__(self, store: Store, members: Sequence[str]) -> None:
        self._store = store
        # name → member, dtype, shape, offset in the file
        self._where: dict[str, tuple[str, str, tuple[int, ...], int]] = {}
        self._maps: dict[str, mmap.mmap] = {}
        for member in members:
            self._read_header(member)

    @property
    def names(self) -> list[str]:
        return list(self._where)

    def describe(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """name → (dtype, shape), without touching data."""
        return {name: (dtype, shape) for name, (_, dtype, shape, _) in self._where.items()}

    def _read_header(self, member: str) -> None:
        def damaged(why: str) -> DamagedMemberError:
            return DamagedMemberError(f"{self._store.path}: {member} is damaged: {why}")

        _, start, size = self._store.region(member)
        with self._store.open(member) as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise damaged(f"its header claims {length} bytes, the file has {size}")
            header = parse_json(member, stream.read(length))
        if not isinstance(header, dict):
            raise damaged("its header is not an object")
        header.pop("__metadata__", None)
        data, expected = 8 + length, 0
        for name, entry in sorted(header.items(), key=lambda item: _begin(item[1])):
            try:
                dtype, shape = _NAMES[entry["dtype"]], tuple(entry["shape"])
                begin, end = entry["data_offsets"]
                if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                    raise ValueError("a size is not a natural number")
            except (KeyError, TypeError, ValueError) as error:
                raise damaged(f"tensor {name!r}: {type(error).__name__} {error}") from None
            if begin != expected or end - begin != math.prod(shape) * numpy_dtype(dtype).itemsize:
                raise damaged(f"tensor {name!r} has bytes {begin} to {end}; it is {dtype}{list(shape)} and "
                              f"starts at {expected}")
            if name in self._where:
                raise damaged(f"tensor {name!r} stands in {self._where[name][0]} too")
            self._where[name] = member, dtype, shape, start + data + begin
            expected = end
        if data + expected != size:
            raise damaged(f"its tensors end at {data + expected}, the file at {size}")

    def __getitem__(self, name: str) -> np.ndarray:
        member, dtype, shape, offset = self._where[name]
        count = math.prod(shape)
        if count == 0:
            return np.empty(shape, numpy_dtype(dtype))
        if member not in self._maps:
            file, _, _ = self._store.region(member)
            with file.open("rb") as f:
                self._maps[member] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        return np.frombuffer(self._maps[member], numpy_dtype(dtype), count, offset).reshape(shape)

    def items(self, order: Sequence[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.names if order is None else order:
            yield name, self[name]

    def region(self, name: str) -> TensorRegion:
        """Where a tensor lies, for those who read files themselves."""
        member, dtype, shape, offset = self._where[name]
        return TensorRegion(name, dtype, shape, self._store.region(member)[0], offset)


@dataclass(frozen=True)
class TensorRegion:
    """A tensor in a file: C-contiguous, little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


class TargetParams:
    """The parameters of one target: tensors of its own stem and those it shares with others (stem → names)."""

    def __init__(self, own: ParamsReader, shared: Mapping[str, tuple[ParamsReader, Sequence[str]]]) -> None:
        self._readers = dict.fromkeys(own.names, own)
        for reader, names in shared.values():
            self._readers |= dict.fromkeys(set(names) & set(reader.names), reader)

    @property
    def names(self) -> list[str]:
        return list(self._readers)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._readers[name][name]

    def region(self, name: str) -> TensorRegion:
        return self._readers[name].region(name)

    def items(self, order: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
        for name in order:
            yield name, self[name]


def _begin(entry: object) -> int:
    try:
        return int(entry["data_offsets"][0])  # type: ignore[index]
    except (KeyError, TypeError, ValueError, IndexError):
        return -1
