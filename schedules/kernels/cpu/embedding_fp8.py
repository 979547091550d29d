"""Embedding gather from an fp8 table in the layout of `linear_fp8`: one row out of the packed panels."""

from __future__ import annotations

from typing import Any

from relaxpack.kernel_spec import EmbeddingSpec

from .builder import Expr, T, i64, load, loop, store
from .embedding import look_up, times
from .isa import widen
from .layout import PANEL
from .layout_fp8 import group_columns, weight_layout


def embedding_fp8(spec: EmbeddingSpec) -> Any:
    """PrimFunc: token_ids i32[t], weight (the layout of linear) → y [t, H]. An id outside the table reads its nearest
    row: the engine checks ids, a kernel must not fault."""
    columns = group_columns(spec.weight, spec.hidden_size)

    def one(weight: Any, y: Any, row: Expr, token: Expr, panel: Expr) -> None:
        lane = T.bind(T.truncmod(token, i64(PANEL)))

        def gather(group: Expr, count: int) -> None:
            raw = load(weight, panel, group, i64(columns * PANEL) + lane * i64(4), lanes=4)
            scale = T.bind(times(spec, T.reinterpret("float32", raw)))
            with loop(count) as k:
                value = widen(weight[panel, group, k * i64(PANEL) + lane], 1)
                store(y, value * scale, row, group * i64(columns) + k)

        whole = spec.hidden_size // columns
        with loop(whole) as group:
            gather(group, columns)
        if spec.hidden_size % columns:
            gather(i64(whole), spec.hidden_size % columns)

    return look_up(spec, weight_layout(spec.weight, spec.vocab_size, spec.hidden_size, False), one)
