"""How a parameter of the compiled functions is made from checkpoint tensors. Passes write recipes, `compile/weights.py`
executes them as a stream. A recipe is a small tree: a checkpoint tensor, rows stacked, products with what was folded in, a
packing for a kernel, or numbers that are computed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FromCheckpoint:
    tensor: str


@dataclass(frozen=True)
class Concat:
    """Parts stacked along axis 0 (the output features)."""

    parts: tuple[Recipe, ...]


@dataclass(frozen=True)
class Pack:
    """One buffer (`suffix`) of the packed form of a weight `[out_features, in_features]` in weight format `format`,
    laid out as the target's kernels want it. All buffers of one weight share everything but `suffix`."""

    format: str
    out_features: int
    in_features: int
    gated: bool
    suffix: str
    of: Recipe


@dataclass(frozen=True)
class ScaleColumns:
    """The matrix `of` with column k times `by[k]`, in float32."""

    of: Recipe
    by: Recipe


@dataclass(frozen=True)
class ScaleBy:
    """`of` times a constant, in float32."""

    of: Recipe
    factor: float


@dataclass(frozen=True)
class Filled:
    """One number everywhere; also the zeros that a kernel keeps between its runs (int32)."""

    shape: tuple[int, ...]
    value: float


@dataclass(frozen=True)
class RopeTable:
    """cos | sin f32[positions, 2 * len(frequencies)] of position times frequency, times `factor`."""

    positions: int
    frequencies: tuple[float, ...]
    factor: float = 1.0

    def numbers(self) -> np.ndarray:
        """Angles are float32 products, as in the reference implementations; their cosines and sines are rounded once."""
        angles = np.arange(self.positions, dtype=np.float32)[:, None] * np.asarray(self.frequencies, np.float32)
        wide = angles.astype(np.float64)
        return np.concatenate([np.cos(wide), np.sin(wide)], axis=1).astype(np.float32) * np.float32(self.factor)


Recipe = FromCheckpoint | Concat | ScaleColumns | ScaleBy | Pack | Filled | RopeTable


def checkpoint_tensors(recipe: Recipe) -> list[str]:
    """Names of the checkpoint tensors a recipe reads, in order."""
    if isinstance(recipe, FromCheckpoint):
        return [recipe.tensor]
    if isinstance(recipe, Concat):
        return [name for part in recipe.parts for name in checkpoint_tensors(part)]
    if isinstance(recipe, RopeTable | Filled):
        return []
    if isinstance(recipe, ScaleColumns):
        return [*checkpoint_tensors(recipe.of), *checkpoint_tensors(recipe.by)]
    return checkpoint_tensors(recipe.of)


def matrix_tensors(recipe: Recipe) -> list[str]:
    """The same without what was folded in: the tensors whose weight format the parameter has."""
    if isinstance(recipe, Concat):
        return [name for part in recipe.parts for name in matrix_tensors(part)]
    if isinstance(recipe, ScaleColumns | ScaleBy | Pack):
        return matrix_tensors(recipe.of)
    return checkpoint_tensors(recipe)


def to_json(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain JSON; `from_json` reads it back."""
    if isinstance(recipe, FromCheckpoint):
        return {"tensor": recipe.tensor}
    if isinstance(recipe, Concat):
        return {"concat": [to_json(part) for part in recipe.parts]}
    if isinstance(recipe, ScaleColumns):
        return {"scale_columns": to_json(recipe.of), "by": to_json(recipe.by)}
    if isinstance(recipe, ScaleBy):
        return {"scale": to_json(recipe.of), "factor": recipe.factor}
    if isinstance(recipe, Filled):
        return {"filled": recipe.value, "shape": list(recipe.shape)}
    if isinstance(recipe, RopeTable):
        return {"rope_table": list(recipe.frequencies), "positions": recipe.positions, "factor": recipe.factor}
    return {"pack": recipe.format, "shape": [recipe.out_features, recipe.in_features], "gated": recipe.gated,
            "suffix": recipe.suffix, "of": to_json(recipe.of)}


def from_json(data: dict[str, Any]) -> Recipe:
    if "tensor" in data:
        return FromCheckpoint(data["tensor"])
    if "concat" in data:
        return Concat(tuple(from_json(part) for part in data["concat"]))
    if "scale_columns" in data:
        return ScaleColumns(from_json(data["scale_columns"]), from_json(data["by"]))
    if "scale" in data:
        return ScaleBy(from_json(data["scale"]), data["factor"])
    if "filled" in data:
        return Filled(tuple(data["shape"]), data["filled"])
    if "rope_table" in data:
        return RopeTable(data["positions"], tuple(data["rope_table"]), data["factor"])
    n, k = data["shape"]
    return Pack(data["pack"], n, k, data["gated"], data["suffix"], from_json(data["of"]))


def dumps(recipes: dict[str, Recipe]) -> str:
    return json.dumps({name: to_json(recipe) for name, recipe in recipes.items()})


def loads(text: str) -> dict[str, Recipe]:
    return {name: from_json(data) for name, data in json.loads(text).items()}
