"""What Gemma's checkpoints have that no other family's have: norm weights are stored as their difference from one.

Its GGUF files hold the weights themselves. Everything else about the family is a row of `families.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relaxpack.relax_models.contents import TensorInfo, TensorSource
from relaxpack.weight_format import FORMATS, QuantizedTensor


class NormsFromOne:
    """A `TensorSource` over another one: norm weights in float32, one added."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    def infos(self) -> dict[str, TensorInfo]:
        return {name: replace(info, format=FORMATS["f32"]) if _is_norm(name) else info
                for name, info in self._source.infos().items()}

    def read(self, name: str) -> np.ndarray | QuantizedTensor:
        value = self._source.read(name)
        if not _is_norm(name):
            return value
        assert isinstance(value, np.ndarray), f"{name} is quantised"
        return value.astype(np.float32) + np.float32(1)

    def same_bytes(self, one: str, other: str) -> bool:
        return self._source.same_bytes(one, other)


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")
