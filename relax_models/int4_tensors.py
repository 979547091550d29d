"""4-bit layers of AWQ, GPTQ and compressed-tensors folders as weights `[out, in]`: codes, scales and whole zeros, nothing
requantised.

Eight codes make an int32, the first in the lowest bits. AWQ and GPTQ store a layer of K inputs and N outputs transposed:
AWQ joins eight outputs, `[K, N/8]`, in the order 0 2 4 6 1 3 5 7; GPTQ eight inputs, `[K/8, N]`; zeros `[groups, N/8]` join
outputs, in GPTQ in their natural order; scales are `[groups, N]`. compressed-tensors has `[N, K/8]`, `[N/8, groups]` and
`[N, groups]`, and no zeros where all are 8. `g_idx` says, where it is there, which group an input belongs to.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from relaxpack.errors import CheckpointError
from relaxpack.relax_models.contents import TensorInfo
from relaxpack.relax_models.int4_import import FIRST_FORM, SECOND_FORM, WHOLE_COLUMN, Int4Scheme
from relaxpack.relax_models.safetensors_folder import SafetensorsFolder, equal_in_chunks
from relaxpack.weight_format import BLOCK, FORMATS, QuantizedTensor, WeightFormat

_SCALES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)       # which of eight outputs each nibble holds
# Endings of a layer's codes, zeros, scales and order of inputs; behind them what only describes it.
_MIDDLE = 8                                 # the zero of all groups where quantisation is symmetric
_SYMMETRIC = {"gptq": "sym", "compressed": "symmetric"}
_REORDERED = {"gptq": "desc_act", "compressed": "actorder"}
_OLD = (".qweight", ".qzeros", ".scales", ".g_idx")
_NAMES = {"awq": _OLD, "gptq": _OLD,
          "compressed": (".weight_packed", ".weight_zero_point", ".weight_scale", ".weight_g_idx", ".weight_shape")}


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
        self._compressed = scheme.method == "compressed"
        self._names = _NAMES[scheme.method]
        ending = self._names[0]
        layers = [name.removesuffix(ending) for name in self._stored if name.endswith(ending)]
        self._layers = {f"{layer}.weight": self._layer(layer) for layer in layers}
        self._zero_biases = {bias for layer in layers if (bias := f"{layer}.bias") in self._stored and bias not in expected
                             and not folder.bytes_of(bias).any()}

    def _layer(self, name: str) -> _Layer:
        codes, zeros, scales, *_ = (name + ending for ending in self._names)
        needed = (scales,) if self._compressed else (zeros, scales)
        if missing := [part for part in needed if part not in self._stored]:
            raise CheckpointError(f"{codes} is there but not {', '.join(missing)}; incomplete download?")
        if f"{name}.weight" in self._stored:
            raise CheckpointError(f"{name} is stored twice, as {name}.weight and as {codes}")
        rows, columns = self._integers(codes)
        outputs, inputs = {"awq": (columns * 8, rows), "gptq": (columns, rows * 8)}.get(
            self._scheme.method, (rows, columns * 8))
        group = inputs if self._scheme.group == WHOLE_COLUMN else self._scheme.group
        if not inputs or inputs % group or outputs % 8:
            raise CheckpointError(f"{codes} has the shape {[rows, columns]}, so {inputs} inputs and {outputs} "
                                  f"outputs; expected multiples of {group} (the group) and 8")
        groups = inputs // group
        for part, wanted in ((zeros, (groups, outputs // 8)), (scales, (groups, outputs))):
            dtype, shape = self._stored.get(part, ("I32", wanted[::-1]))
            wanted = wanted[::-1] if self._compressed else wanted
            if shape != wanted or (part == zeros and dtype != "I32"):
                raise CheckpointError(f"{part} is {dtype}{list(shape)}, which does not fit {codes} of "
                                      f"{[rows, columns]} in groups of {group}; expected {list(wanted)}")
            if part == scales and dtype not in _SCALES:
                raise CheckpointError(f"{part} is stored as {dtype}; scales may be {', '.join(_SCALES)}")
        blocks = self._scheme.group == WHOLE_COLUMN or group % BLOCK == 0
        format = FORMATS["q4_128" if blocks and self._fits_float16(scales) else "q4_k"]
        if group % 32 and not format.long_groups:
            raise CheckpointError(f"{scales} holds what float16 does not, and {inputs} inputs are no multiple of 32")
        layer = _Layer(name, outputs, inputs, group, format)
        self._check_order(layer)
        self._check_zeros(layer)
        return layer

    def _integers(self, name: str) -> tuple[int, int]:
        dtype, shape = self._stored[name]
        if dtype != "I32" or len(shape) != 2:
            raise CheckpointError(f"{name} is {dtype}{list(shape)}; expected a matrix of I32")
        return shape[0], shape[1]

    def _check_order(self, layer: _Layer) -> None:
        """The groups must be neighbours along the inputs."""
        name = layer.name + self._names[3]
        if name not in self._stored:
            if self._scheme.reordered and layer.groups > 1:
                raise CheckpointError(f"{name} is not there, but quantization_config says that the inputs were reordered "
                                      f"({_REORDERED[self._scheme.method]}): which group an input belongs to is not known; "
                                      "incomplete download?")
            return
        dtype, shape = self._stored[name]
        if dtype != "I32" or shape != (layer.inputs,):
            raise CheckpointError(f"{name} is {dtype}{list(shape)}; expected I32[{layer.inputs}]")
        if not np.array_equal(self._read(name, np.int32), np.arange(layer.inputs) // layer.group):
            raise CheckpointError(f"{name}: the groups are not neighbouring inputs (quantised with desc_act), which is not "
                                  "supported; give a checkpoint made with desc_act false, an AWQ one, or a GGUF file")

    def _check_zeros(self, layer: _Layer) -> None:
        """What quantization_config says of the zeros must be so: where it contradicts them, one of the two is wrong."""
        name, scheme = layer.name + self._names[1], self._scheme
        if scheme.symmetric is False and name not in self._stored:
            raise CheckpointError(f"{name} is not there, but quantization_config says symmetric false: the zeros are not "
                                  "known; incomplete download?")
        if not scheme.symmetric or name not in self._stored:
            return
        found = np.unique(self._zeros(layer))
        if found.tolist() == [_MIDDLE]:
            return
        other = {(1, _MIDDLE + 1): SECOND_FORM, (0, _MIDDLE - 1): FIRST_FORM}.get((scheme.zero_offset, int(found[0])))
        why = (f"; that is what checkpoint_format {other!r} would make {_MIDDLE}: the key names the wrong form"
               if scheme.method == "gptq" and len(found) == 1 and other else "")
        values = f"{found[0]}" if len(found) == 1 else f"{found[0]} to {found[-1]}"
        raise CheckpointError(f"{name} holds zeros of {values}, but quantization_config says {_SYMMETRIC[scheme.method]} "
                              f"true, so that all are {_MIDDLE}{why}. Ask its publisher which is true")

    def infos(self) -> dict[str, TensorInfo]:
        own = {layer.name + ending for layer in self._layers.values() for ending in self._names} | self._zero_biases
        infos = self._folder.infos([name for name in self._stored if name not in own])
        for name, layer in self._layers.items():
            infos[name] = TensorInfo(name, (layer.outputs, layer.inputs), layer.format)
        return infos

    def read(self, name: str) -> np.ndarray | QuantizedTensor:
        """Raises CheckpointError where a scale is not finite."""
        if name not in self._layers:
            return self._folder.read(name)
        layer = self._layers[name]
        codes, zeros, scales = self._codes(layer), self._zeros(layer), self._scales(layer.name + self._names[2])
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{layer.name}{self._names[2]} holds {scales[~np.isfinite(scales)][0]}; scales must be "
                                  "finite")
        times = -(-layer.group // layer.format.group_size)
        if layer.format.zeros:
            return QuantizedTensor(layer.format, codes, np.repeat(scales.astype(np.float16), times, axis=1),
                                   zeros=np.repeat(zeros, times, axis=1))
        return QuantizedTensor(layer.format, codes, *(np.repeat(part, times, axis=1) for part in (scales, -scales * zeros)))

    def _codes(self, layer: _Layer) -> np.ndarray:
        words = self._by_output(layer.name + self._names[0], np.uint32)         # AWQ [N/8, K], others [N, K/8]
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
        zeros = np.full((layer.outputs, layer.groups), _MIDDLE, np.uint8)
        if layer.name + self._names[1] not in self._stored:
            return zeros
        words = self._by_output(layer.name + self._names[1], np.uint32)
        for nibble, place in enumerate(_AWQ_ORDER if self._scheme.method == "awq" else range(8)):
            zeros[place::8] = (words >> (4 * nibble)) + self._scheme.zero_offset & 15
        return zeros

    def _scales(self, name: str) -> np.ndarray:
        """float32 `[N, groups]`."""
        return self._by_output(name, _SCALES[self._stored[name][0]]).astype(np.float32)

    def _fits_float16(self, name: str) -> bool:
        """Scales of another type that float16 does not hold take the format with float32 ones."""
        if self._stored[name][0] == "F16":
            return True
        scales = self._scales(name)
        with np.errstate(over="ignore"):
            return np.array_equal(scales.astype(np.float16).astype(np.float32), scales, equal_nan=True)

    def _by_output(self, name: str, dtype: type) -> np.ndarray:
        array = self._read(name, dtype)
        return array if self._compressed else array.T

    def _read(self, name: str, dtype: type) -> np.ndarray:
        """Copied: parts need not be aligned in the file."""
        return self._folder.bytes_of(name).copy().view(dtype).reshape(self._stored[name][1])

    def same_bytes(self, one: str, other: str) -> bool:
        """Equal dtype, shape and bytes, in all parts."""
        a, b = self._layers.get(one), self._layers.get(other)
        if a is None or b is None:
            return a is b and self._folder.same_bytes(one, other)
        parts = [(a.name + ending, b.name + ending) for ending in self._names[:3]]
        return all(self._stored.get(first) == self._stored.get(second) for first, second in parts) and all(
            equal_in_chunks(self._folder.bytes_of(first), self._folder.bytes_of(second))
            for first, second in parts if first in self._stored)
