"""float8 e4m3fn weights of a Hugging Face folder, joined with the scales that lie beside them.

Three forms are read, all without requantising: a scale per tensor, per output channel, or per block (DeepSeek, Qwen3-FP8).
Scales of activations are left where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from relaxpack.errors import CheckpointError
from relaxpack.relax_models.contents import TensorInfo
from relaxpack.relax_models.fp8_import import Fp8Scheme
from relaxpack.relax_models.safetensors_folder import SafetensorsFolder, equal_in_chunks
from relaxpack.weight_format import BLOCK, FORMATS, QuantizedTensor

_SCALE_NAMES = ("_scale", "_scale_inv")                # after the name of the weight; both are multiplied with
_SCALE_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
_ACTIVATION_SCALES = (".input_scale", ".output_scale", ".activation_scale", ".q_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True)
class _Scaled:
    """An fp8 weight: `[N, K]`, and the tensor with its scales."""

    shape: tuple[int, int]
    scale: str
    kind: str  # "tensor" | "row" | "block"


class Fp8Tensors:
    """A `TensorSource`: the tensors of a folder, those in float8 e4m3fn joined with their scales."""

    def __init__(self, folder: SafetensorsFolder, scheme: Fp8Scheme) -> None:
        self._folder, self._scheme = folder, scheme
        self._stored = folder.stored()
        self._scaled = {name: self._find_scale(name, shape) for name, (dtype, shape) in self._stored.items()
                        if dtype == "F8_E4M3"}

    def _find_scale(self, name: str, shape: tuple[int, ...]) -> _Scaled:
        if len(shape) != 2:
            raise CheckpointError(f"{name} is stored as F8_E4M3 with {len(shape)} dimensions; expected a matrix")
        found = [name + end for end in _SCALE_NAMES if name + end in self._stored]
        if len(found) != 1:
            raise CheckpointError(f"{name} is stored as F8_E4M3 and needs one tensor of scales, {name}_scale or "
                                  f"{name}_scale_inv; there {'are both' if found else 'is none'}")
        dtype, given = self._stored[found[0]]
        if dtype not in _SCALE_DTYPES:
            raise CheckpointError(f"{found[0]} is stored as {dtype}; scales may be {', '.join(_SCALE_DTYPES)}")
        block, n, k = self._scheme.block, *shape
        kinds = {"block": block is not None and given == (-(-n // block[0]), -(-k // block[1])),
                 "tensor": math.prod(given) == 1, "row": given in ((n,), (n, 1))}
        kind = next((kind for kind, fits in kinds.items() if fits), None)
        if kind is None:
            blocks = f", or {[-(-n // block[0]), -(-k // block[1])]} for blocks of {list(block)}" if block else ""
            raise CheckpointError(f"{found[0]} has the shape {list(given)}, which does not fit {name} of {[n, k]}; expected "
                                  f"[], [1], [{n}] or [{n}, 1]{blocks}")
        return _Scaled((n, k), found[0], kind)

    def infos(self) -> dict[str, TensorInfo]:
        own = {*self._scaled, *(scaled.scale for scaled in self._scaled.values())}
        own |= {name for name in self._stored if name.endswith(_ACTIVATION_SCALES)}
        infos = self._folder.infos([name for name in self._stored if name not in own])
        for name, scaled in self._scaled.items():
            infos[name] = TensorInfo(name, scaled.shape, FORMATS["fp8_block" if scaled.kind == "block" else "fp8"])
        return infos

    def read(self, name: str) -> np.ndarray | QuantizedTensor:
        """Raises CheckpointError where a code or a scale is not a number."""
        if name not in self._scaled:
            return self._folder.read(name)
        scaled = self._scaled[name]
        n, k = scaled.shape
        codes = self._folder.bytes_of(name).reshape(n, k)
        if any((codes[i:i + 1024] & 0x7F == 0x7F).any() for i in range(0, n, 1024)):
            raise CheckpointError(f"{name} holds NaN (an fp8 code 0x7f or 0xff); the file is damaged, or was quantised "
                                  "wrongly")
        scales = self._scales(scaled)
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{scaled.scale} holds {scales[~np.isfinite(scales)][0]}; scales must be finite")
        if scaled.kind != "block":
            by_row = np.ascontiguousarray(np.broadcast_to(scales.reshape(-1, 1), (n, 1)))
            return QuantizedTensor(FORMATS["fp8"], codes, by_row)
        assert self._scheme.block is not None
        rows, columns = self._scheme.block
        wide = np.repeat(np.repeat(scales, rows, axis=0)[:n], columns // BLOCK, axis=1)
        return QuantizedTensor(FORMATS["fp8_block"], codes, np.ascontiguousarray(wide[:, :-(-k // BLOCK)]))

    def _scales(self, scaled: _Scaled) -> np.ndarray:
        dtype, shape = self._stored[scaled.scale]
        return self._folder.bytes_of(scaled.scale).copy().view(_SCALE_DTYPES[dtype]).astype(np.float32).reshape(shape)

    def same_bytes(self, one: str, other: str) -> bool:
        """Equal dtype, shape and bytes, those of the scales included."""
        a, b = self._scaled.get(one), self._scaled.get(other)
        if a is None or b is None:
            return a is b and self._folder.same_bytes(one, other)
        return (a.shape == b.shape and self._folder.same_bytes(a.scale, b.scale)
                and equal_in_chunks(self._folder.bytes_of(one), self._folder.bytes_of(other)))
