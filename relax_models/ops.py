"""The operations models are written with: thin names over Relax, and the one placeholder op that no Relax op expresses,
paged attention. They say what is computed; passes choose the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import TOP_LOGPROBS
from relaxpack.placeholders import SAMPLE, TOP
from tvm import relax, te, tirx

Expr = Any  # tvm.relax.Expr; TVM is untyped


class Graph:
    """Emits bindings into the function being built. One instance per exported function."""

    def __init__(self, builder: relax.BlockBuilder) -> None:
        self.builder = builder

    def __call__(self, expr: Expr) -> Expr:
        return self.builder.emit(expr)

    def linear(self, x: Expr, weight: Expr, bias: Expr | None = None) -> Expr:
        """x [t, K] · weight [N, K] → [t, N]."""
        y = self(relax.op.matmul(x, self(relax.op.permute_dims(weight))))
        return y if bias is None else self(relax.op.add(y, bias))

    def rms_norm(self, x: Expr, weight: Expr, epsilon: float) -> Expr:
        return self(relax.op.nn.rms_norm(x, weight, axes=-1, epsilon=epsilon))

    def add(self, a: Expr, b: Expr) -> Expr:
        return self(relax.op.add(a, b))

    def scale(self, x: Expr, factor: float) -> Expr:
        return self(relax.op.multiply(x, relax.const(factor, x.ty.dtype)))

    def glu(self, activation: str, gate: Expr, up: Expr) -> Expr:
        """`activation`: "silu" or "gelu_tanh"."""
        return self(relax.op.multiply(self(getattr(relax.op.nn, activation)(gate)), up))

    def concat(self, parts: list[Expr]) -> Expr:
        return self(relax.op.concat(parts, axis=1))

    def take_rows(self, x: Expr, rows: Expr) -> Expr:
        """x [t, H], rows i32[r] → [r, H]."""
        return self(relax.op.take(x, rows, axis=0, mode="clip"))

    def attention(self, name: str, operands: list[Expr], layer: int, window: int | None, width: int) -> Expr:
        """RoPE + append to the pages + attention of one layer: `operands` are qkv [t, (H+2KV)*D], pages and the step's
        integer tensors; the result is [t, width]. The pages are changed in place."""
        qkv = operands[0]
        static = [relax.prim_value(layer), relax.prim_value(window or 0)]
        out = relax.TensorType([qkv.ty.shape[0], width], qkv.ty.dtype)
        return self(relax.call_dps_packed(name, [*operands, *static], out))

    def next_token_ids(self, token_ids: Expr, source: Expr, drawn: Expr) -> Expr:
        """Row by row the token the host gives, or the one that an earlier step put into row `source` of `drawn`."""
        def next_token_ids(given: Any, row: Any, sampled: Any) -> Any:
            return te.compute(given.shape, lambda i: tirx.if_then_else(
                row[i] >= 0, sampled[tirx.max(row[i], 0), 0], given[i]), name="next_token_ids")

        return self.builder.emit_te(next_token_ids, token_ids, source, drawn)

    def sample(self, logits: Expr, settings: Expr, counters: Expr, counts: Expr, drawn: Expr, *allowed: Expr) -> Expr:
        """logits f32[t, V] → `drawn` i32[t or more, 2]: token ids and the bits of their log-probabilities. It and counts
        are changed in place. `allowed`, where rows may be constrained: the masks of allowed tokens."""
        return self(relax.call_dps_packed(SAMPLE, [logits, settings, counters, counts, drawn, *allowed], drawn.ty))

    def top_logprobs(self, logits: Expr, counters: Expr) -> Expr:
        """logits f32[t, V], counters i32[t, 8] → the likeliest tokens i32[t, TOP_LOGPROBS] and their log-probabilities."""
        shape = [logits.ty.shape[0], TOP_LOGPROBS]
        return self(relax.call_dps_packed(TOP, [logits, counters], [
            relax.TensorType(shape, "int32"), relax.TensorType(shape, "float32")]))


def rope_table(graph: Graph, inv_freq: Any, max_position: int, attention_factor: float) -> Expr:
    """cos | sin table f32[max_position, 2 * len(inv_freq)], as Relax arithmetic that constant folding evaluates.
    Angles are float32 products, as in the reference implementations."""
    positions = relax.const(np.arange(max_position, dtype="float32")[:, None], "float32")
    angles = graph(relax.op.multiply(positions, relax.const(inv_freq[None, :], "float32")))
    table = graph(relax.op.concat([graph(relax.op.cos(angles)), graph(relax.op.sin(angles))], axis=1))
    return table if attention_factor == 1.0 else graph(
        relax.op.multiply(table, relax.const(attention_factor, "float32")))
