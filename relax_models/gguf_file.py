"""Reads the container format of a .gguf file: metadata, tensor directory, mapped tensor bytes.

Written from the published GGUF specification (versions 2 and 3, little-endian). Every size is checked against the
file before it is used. What keys and names mean is `gguf_import.py`.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relaxpack.errors import CheckpointError
from relaxpack.relax_models.gguf_blocks import GGML_TYPES, UNSUPPORTED_TYPES, GgmlType, decode
from relaxpack.weight_format import QuantizedTensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # nesting of arrays


@dataclass(frozen=True)
class GgufTensor:
    """`shape` in numpy order: the file stores it reversed."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    start: int
    end: int


class GgufFile:
    """Metadata as Python values; tensors on demand."""

    def __init__(self, path: Path) -> None:
        self.name, self.size = path.name, path.stat().st_size
        if self.size < 24:
            raise CheckpointError(f"{self.name} has {self.size} bytes and is not a GGUF file; incomplete download?")
        with open(path, "rb") as handle:
            self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        magic, self.version = self._take(4), self._scalar("I")
        if magic != b"GGUF":
            raise CheckpointError(f"{self.name} does not start with the GGUF magic (found {magic!r})")
        if self.version not in (2, 3):
            swapped = int.from_bytes(self.version.to_bytes(4, "little"), "big") in (2, 3)
            raise CheckpointError(f"{self.name} has GGUF version {self.version}"
                                  f"{' (big-endian)' if swapped else ''}; supported: 2 and 3, little-endian")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            if key in self.metadata:
                raise CheckpointError(f"{self.name}: the metadata key {key!r} appears twice")
            self.metadata[key] = self._value(self._scalar("I"), 0)
        self.tensors = self._directory(tensor_count)

    def _take(self, count: int) -> bytes:
        if count > self.size - self._at:
            raise CheckpointError(f"{self.name} ends inside its header ({self.size} bytes); incomplete download?")
        self._at += count
        return self._map[self._at - count:self._at]

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        # A vocabulary may hold text cut inside a character: keep such bytes instead of failing.
        return self._take(self._scalar("Q")).decode("utf-8", "surrogateescape")

    def _value(self, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth >= _MAX_DEPTH:
            raise CheckpointError(f"{self.name}: damaged metadata (value type {kind} at byte {self._at})")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            code = _SCALARS[item]
            if code == "?":
                return [b != 0 for b in self._take(count)]
            data = self._take(count * struct.calcsize("<" + code))
            return np.frombuffer(data, np.dtype("<" + code)).tolist()
        if count > self.size - self._at:
            raise CheckpointError(f"{self.name}: damaged metadata (an array of {count} values); incomplete download?")
        return [self._value(item, depth + 1) for _ in range(count)]

    def _directory(self, count: int) -> dict[str, GgufTensor]:
        rows = []
        for _ in range(count):
            name, dims = self._string(), self._scalar("I")
            if not 1 <= dims <= 4:
                raise CheckpointError(f"{self.name}: tensor {name!r} has {dims} dimensions; the file is damaged")
            shape = tuple(reversed([self._scalar("Q") for _ in range(dims)]))
            rows.append((name, shape, self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.name}: general.alignment is {alignment!r}; the file is damaged")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in rows:
            if name in tensors:
                raise CheckpointError(f"{self.name}: the tensor {name!r} appears twice")
            tensors[name] = self._tensor(name, shape, number, base + offset)
        return tensors

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
        kind = GGML_TYPES.get(number)
        if kind is None:
            given = UNSUPPORTED_TYPES.get(number, f"number {number}")
            raise CheckpointError(f"{self.name}: {name} has the GGUF type {given}; supported: "
                                  f"{', '.join(t.name for t in GGML_TYPES.values())}")
        count = 1
        for n in shape:
            count *= n
        if shape[-1] % kind.block:
            raise CheckpointError(f"{self.name}: {name} of shape {list(shape)} does not divide into {kind.name} blocks "
                                  f"of {kind.block}; the file is damaged")
        end = start + count // kind.block * kind.size
        if end > self.size:
            raise CheckpointError(f"{self.name} is cut: {name} ends at byte {end}, the file has {self.size}; "
                                  "incomplete download?")
        return GgufTensor(name, shape, kind, start, end)

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8, mapped."""
        tensor = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, tensor.end - tensor.start, tensor.start)

    def read(self, name: str) -> np.ndarray | QuantizedTensor:
        tensor = self.tensors[name]
        return decode(tensor.kind, self.raw(name), tensor.shape)
