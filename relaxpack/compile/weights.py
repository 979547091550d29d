"""From checkpoint tensors to the parameters of the compiled functions: which weight format each tensor takes, and the
execution of recipes, one parameter at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from relaxpack.errors import CompileError, UsageError
from relaxpack.kernel_spec import KernelProvider
from relaxpack.recipe import Concat, Filled, FromCheckpoint, Pack, Recipe, RopeTable, ScaleBy, ScaleColumns
from relaxpack.relax_models.quantize import WEIGHT_CHOICES, quantize
from relaxpack.weight_format import FORMATS, WEIGHTS, QuantizedTensor, WeightFormat

if TYPE_CHECKING:
    from relaxpack.relax_models.checkpoint import Checkpoint

FLOAT16_MAX = 65504.0
Weight = np.ndarray | QuantizedTensor


def choose_formats(checkpoint: Checkpoint, weights: str, activation_dtype: str = "float32") -> dict[str, WeightFormat]:
    """Weight format of every matrix of the checkpoint under `--weights`. `as-is` keeps what the checkpoint has; `q4`
    keeps 4-bit tensors as they are and makes the rest q4_1, `q4-128` likewise q4_128, `fp8` keeps what has 8 bits or fewer
    (embedding table and head become q8_0 in all three); a tensor whose rows do not divide into groups becomes f16. Where
    activations have 16 bits (GPUs), float weights take the activation dtype."""
    if weights not in WEIGHTS:
        raise UsageError(f"weights {weights!r}: expected one of {', '.join(WEIGHTS)}")
    chosen = {name: _choose(name, info.shape, info.format, weights)
              for name, info in checkpoint.tensors.items() if len(info.shape) == 2}
    if activation_dtype == "float32":
        return chosen
    floats = FORMATS[{"bfloat16": "bf16", "float16": "f16"}[activation_dtype]]
    return {name: fmt if fmt.quantized else floats for name, fmt in chosen.items()}


def fixed_weights(checkpoint: Checkpoint, formats: Mapping[str, WeightFormat]) -> frozenset[str]:
    """Matrices that are quantised in the checkpoint and stay so: another factor in them would quantise them twice."""
    return frozenset(name for name, fmt in formats.items() if fmt.quantized and checkpoint.tensors[name].format.quantized)


def weight_bytes(checkpoint: Checkpoint, formats: Mapping[str, WeightFormat]) -> int:
    """What the matrices will take, known before anything is compiled; packing may pad them a little."""
    return int(sum(math.prod(checkpoint.tensors[name].shape) * fmt.bytes_per_weight() for name, fmt in formats.items()))


def _choose(name: str, shape: tuple[int, ...], stored: WeightFormat, weights: str) -> WeightFormat:
    if weights == "as-is":
        return stored
    if weights not in WEIGHT_CHOICES:
        return FORMATS[weights]
    table = name in ("model.embed_tokens.weight", "lm_head.weight")
    wanted = WEIGHT_CHOICES["q8" if table else weights]
    if stored.quantized and (stored.bits == wanted.bits or stored.bits < wanted.bits):
        return stored
    return wanted if wanted.long_groups or shape[1] % wanted.group_size == 0 else FORMATS["f16"]


def convert(weight: Weight, wanted: WeightFormat) -> Weight:
    """The weight in another format; as it is where it has that format already."""
    if isinstance(weight, QuantizedTensor):
        if weight.format == wanted:
            return weight
        weight = weight.dequantize()
    return quantize(np.asarray(weight, np.float32), wanted) if wanted.quantized else _as_float(weight, wanted.dtype)


def _as_float(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    if dtype == "float16" and array.dtype != np.float16 and array.size:
        largest = float(np.abs(array).max())
        if FLOAT16_MAX < largest < np.inf:
            raise CompileError(f"a weight of {largest:.3g} does not fit into float16, which ends at 65504: build with "
                               "--dtype bfloat16 (GPU), or --weights bf16 or f32 (CPU)")
    return array.astype(dtype)


def _concat(parts: list[Weight]) -> Weight:
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)  # type: ignore[arg-type]
    minimums = None if first.minimums is None else np.concatenate([p.minimums for p in parts])  # type: ignore[union-attr]
    zeros = None if first.zeros is None else np.concatenate([p.zeros for p in parts])  # type: ignore[union-attr]
    return QuantizedTensor(first.format, np.concatenate([p.codes for p in parts]),  # type: ignore[union-attr]
                           np.concatenate([p.scales for p in parts]), minimums, zeros)  # type: ignore[union-attr]


class ParameterMaker:
    """Executes recipes. Buffers of one packed weight follow each other, so the last packing is kept. `through`: formats that
    the checkpoint's tensors take first, so that a weight has the numbers of another build."""

    def __init__(self, checkpoint: Checkpoint, provider: KernelProvider,
                 through: Mapping[str, WeightFormat] = MappingProxyType({})) -> None:
        self._checkpoint, self._provider, self._through = checkpoint, provider, through
        self._last: tuple[Pack, Mapping[str, np.ndarray]] | None = None

    def make(self, recipe: Recipe, dtype: str) -> np.ndarray:
        """The parameter as a C-contiguous array of `dtype`."""
        if isinstance(recipe, Pack):
            return np.ascontiguousarray(self._packed(recipe)[recipe.suffix])
        if isinstance(recipe, RopeTable):
            return recipe.numbers()
        if isinstance(recipe, Filled):
            full = np.full(recipe.shape, recipe.value, np.float32)
            return full.astype(dtype) if dtype == "int32" else _as_float(full, dtype)
        weight = self._weight(recipe, None)
        if isinstance(weight, QuantizedTensor):
            weight = weight.dequantize()
        return np.ascontiguousarray(_as_float(weight, dtype))

    def _packed(self, recipe: Pack) -> Mapping[str, np.ndarray]:
        if self._last is None or self._last[0].of != recipe.of:
            wanted = FORMATS[recipe.format]
            layout = self._provider.weight_layout(wanted, recipe.out_features, recipe.in_features, recipe.gated)
            self._last = recipe, self._provider.pack(layout, self._weight(recipe.of, wanted))
        return self._last[1]

    def _weight(self, recipe: Recipe, wanted: WeightFormat | None) -> Weight:
        if isinstance(recipe, FromCheckpoint):
            weight = self._checkpoint.read(recipe.tensor)
            if recipe.tensor in self._through:
                weight = convert(weight, self._through[recipe.tensor])
            return weight if wanted is None else convert(weight, wanted)
        if isinstance(recipe, Concat):
            return _concat([self._weight(part, wanted) for part in recipe.parts])
        if isinstance(recipe, ScaleColumns | ScaleBy):
            by = self._float32(recipe.by) if isinstance(recipe, ScaleColumns) else np.float32(recipe.factor)
            scaled = self._float32(recipe.of) * by
            return scaled if wanted is None else convert(scaled, wanted)
        raise TypeError(f"no weight of a checkpoint: {recipe}")

    def _float32(self, recipe: Recipe) -> np.ndarray:
        weight = self._weight(recipe, None)
        return weight.dequantize() if isinstance(weight, QuantizedTensor) else np.asarray(weight, np.float32)
