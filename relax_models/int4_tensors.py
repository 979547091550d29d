"""4-bit layers of AWQ and GPTQ folders as weights `[out, in]`: codes, float16 scales and whole zeros, nothing requantised.

A layer of K inputs and N outputs is stored transposed, eight codes to an int32, the first in the lowest bits: AWQ joins
eight outputs, `[K, N/8]`, in the order 0 2 4 6 1 3 5 7; GPTQ eight inputs, `[K/8, N]`, and may list in `g_idx` which group
an input belongs to. Zeros `[groups, N/8]` join outputs in both, in GPTQ in their natural order; scales are `[groups, N]`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from relaxpack.errors import CheckpointError
from relaxpack.relax_models.contents import TensorInfo
from relaxpack.relax_models.int4_import import WHOLE_COLUMN, Int4Scheme
from relaxpack.relax_models.safetensors_folder import SafetensorsFolder, equal_in_chunks
from relaxpack.weight_format import BLOCK, FORMATS, QuantizedTensor, WeightFormat

_SCALES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)       # which of eight outputs each nibble holds
_PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class _Layer:
    """`group`: input features to a scale, as many groups as are stored. `format`: what holds its numbers without loss."""

    name: str
    outputs: int
    inputs: int
    group: int
    format: WeightFormat

    @property
    def groups(self) -> int:
        return self.inputs // self.group


class Int4Tensors:
    """A `TensorSource`: the tensors of a folder, the parts of each quantised layer joined to `<layer>.weight`. `expected`:
    the names that the model has; biases beyond these are left out where they are zero, as some quantisers write them."""

    def __init__(self, folder: SafetensorsFolder, scheme: Int4Scheme, expected: Collection[str]) -> None:
        self._folder, self._scheme, self._stored = folder, scheme, folder.stored()
        layers = [name.removesuffix(".qweight") for name in self._stored if name.endswith(".qweight")]
        self._layers = {f"{layer}.weight": self._layer(layer) for layer in layers}
        self._zero_biases = {bias for layer in layers if (bias := f"{layer}.bias") in self._stored and bias not in expected
                             and not folder.bytes_of(bias).any()}

    def _layer(self, name: str) -> _Layer:
        missing = [f"{name}.{part}" for part in _PARTS if f"{name}.{part}" not in self._stored]
        if missing:
            raise CheckpointError(f"{name}.qweight is there but not {', '.join(missing)}; incomplete download?")
        if f"{name}.weight" in self._stored:
            raise CheckpointError(f"{name} is stored twice, as {name}.weight and as {name}.qweight")
        rows, columns = self._integers(f"{name}.qweight")
        inputs, outputs = (rows, columns * 8) if self._scheme.method == "awq" else (rows * 8, columns)
        group = inputs if self._scheme.group == WHOLE_COLUMN else self._scheme.group
        if not inputs or inputs % group or outputs % 8:
            raise CheckpointError(f"{name}.qweight has the shape {[rows, columns]}, so {inputs} inputs and {outputs} "
                                  f"outputs; expected multiples of {group} (the group) and 8")
        groups = inputs // group
        for part, wanted in (("qzeros", (groups, outputs // 8)), ("scales", (groups, outputs))):
            dtype, shape = self._stored[f"{name}.{part}"]
            if shape != wanted or (part == "qzeros" and dtype != "I32"):
                raise CheckpointError(f"{name}.{part} is {dtype}{list(shape)}, which does not fit {name}.qweight of "
                                      f"{[rows, columns]} in groups of {group}; expected {list(wanted)}")
            if part == "scales" and dtype not in _SCALES:
                raise CheckpointError(f"{name}.scales is stored as {dtype}; scales may be {', '.join(_SCALES)}")
        blocks = self._scheme.group == WHOLE_COLUMN or group % BLOCK == 0
        format = FORMATS["q4_128" if blocks and self._fits_float16(f"{name}.scales") else "q4_k"]
        if group % 32 and not format.long_groups:
            raise CheckpointError(f"{name}.scales are no float16 numbers, and {inputs} inputs are no multiple of 32")
        layer = _Layer(name, outputs, inputs, group, format)
        self._check_order(layer)
        return layer

    def _integers(self, name: str) -> tuple[int, int]:
        dtype, shape = self._stored[name]
        if dtype != "I32" or len(shape) != 2:
            raise CheckpointError(f"{name} is {dtype}{list(shape)}; expected a matrix of I32")
        return shape[0], shape[1]

    def _check_order(self, layer: _Layer) -> None:
        """The groups must be neighbours along the inputs."""
        name = f"{layer.name}.g_idx"
        if name not in self._stored:
            return
        dtype, shape = self._stored[name]
        if dtype != "I32" or shape != (layer.inputs,):
            raise CheckpointError(f"{name} is {dtype}{list(shape)}; expected I32[{layer.inputs}]")
        if not np.array_equal(self._read(name, np.int32), np.arange(layer.inputs) // layer.group):
            raise CheckpointError(f"{name}: the groups are not neighbouring inputs (quantised with desc_act), which is not "
                                  "supported; give a checkpoint made with desc_act false, an AWQ one, or a GGUF file")

    def infos(self) -> dict[str, TensorInfo]:
        own = {f"{layer.name}.{part}" for layer in self._layers.values() for part in (*_PARTS, "g_idx")} | self._zero_biases
        infos = self._folder.infos([name for name in self._stored if name not in own])
        for name, layer in self._layers.items():
            infos[name] = TensorInfo(name, (layer.outputs, layer.inputs), layer.format)
        return infos

    def read(self, name: str) -> np.ndarray | QuantizedTensor:
        """Raises CheckpointError where a scale is not finite."""
        if name not in self._layers:
            return self._folder.read(name)
        layer = self._layers[name]
        codes, zeros, scales = self._codes(layer), self._zeros(layer), self._scales(f"{layer.name}.scales").T
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{layer.name}.scales holds {scales[~np.isfinite(scales)][0]}; scales must be finite")
        times = -(-layer.group // layer.format.group_size)
        if layer.format.zeros:
            return QuantizedTensor(layer.format, codes, np.repeat(scales.astype(np.float16), times, axis=1),
                                   zeros=np.repeat(zeros, times, axis=1))
        return QuantizedTensor(layer.format, codes, *(np.repeat(part, times, axis=1) for part in (scales, -scales * zeros)))

    def _codes(self, layer: _Layer) -> np.ndarray:
        words = self._read(f"{layer.name}.qweight", np.uint32).T        # AWQ [N/8, K], GPTQ [N, K/8]
        codes = np.empty((layer.outputs, layer.inputs), np.uint8)
        for nibble in range(8):
            part = (words >> (4 * nibble) & 15).astype(np.uint8)
            if self._scheme.method == "awq":
                codes[_AWQ_ORDER[nibble]::8] = part
            else:
                codes[:, nibble::8] = part
        return codes

    def _zeros(self, layer: _Layer) -> np.ndarray:
        """uint8 `[N, groups]`. Stored less one, a zero of 0 has become 15."""
        words = self._read(f"{layer.name}.qzeros", np.uint32).T
        zeros = np.empty((layer.outputs, layer.groups), np.uint8)
        for nibble, place in enumerate(_AWQ_ORDER if self._scheme.method == "awq" else range(8)):
            zeros[place::8] = (words >> (4 * nibble)) + self._scheme.zero_offset & 15
        return zeros

    def _scales(self, name: str) -> np.ndarray:
        """float32 `[groups, N]`."""
        return self._read(name, _SCALES[self._stored[name][0]]).astype(np.float32)

    def _fits_float16(self, name: str) -> bool:
        """Scales of another type that float16 does not hold take the format with float32 ones."""
        if self._stored[name][0] == "F16":
            return True
        scales = self._scales(name)
        with np.errstate(over="ignore"):
            return np.array_equal(scales.astype(np.float16).astype(np.float32), scales, equal_nan=True)

    def _read(self, name: str, dtype: type) -> np.ndarray:
        """Copied: parts need not be aligned in the file."""
        return self._folder.bytes_of(name).copy().view(dtype).reshape(self._stored[name][1])

    def same_bytes(self, one: str, other: str) -> bool:
        """Equal dtype, shape and bytes, in all parts."""
        a, b = self._layers.get(one), self._layers.get(other)
        if a is None or b is None:
            return a is b and self._folder.same_bytes(one, other)
        return all(self._stored[f"{a.name}.{part}"] == self._stored[f"{b.name}.{part}"] and equal_in_chunks(
            self._folder.bytes_of(f"{a.name}.{part}"), self._folder.bytes_of(f"{b.name}.{part}")) for part in _PARTS)
