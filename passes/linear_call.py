"""A `relaxpack.linear` placeholder as the question that kernels answer: its spec and its operands by buffer name.

Operands stand in the order x, buffers of the weight, [bias], [residual], [norm_weight], [squares, epsilon], format, gated;
what is in brackets is there where the placeholder's name says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import MANY_ROWS, LinearSpec
from relaxpack.passes.rewrite import placeholder_name
from relaxpack.placeholders import GLU, LINEAR
from relaxpack.weight_format import FORMATS

# What may stand behind the name, in the order of the operands that belong to it.
BIAS, RESIDUAL, PREPARES_NORM, NORM = "bias", "residual", "prepares_norm", "norm"


@dataclass(frozen=True)
class LinearCall:
    """`weight`: the packed buffers; `named`: the other tensors by buffer name."""

    spec: LinearSpec
    weight: list[Any]
    named: dict[str, Any]


def is_linear(call: Any) -> bool:
    return (placeholder_name(call) or "").startswith(LINEAR)


def flags_of(call: Any) -> list[str]:
    """What stands behind the name of a linear."""
    return (placeholder_name(call) or "").removeprefix(LINEAR).split("+")[1:]


def read_linear(call: Any, operands: Sequence[Any], phase: str, y: Any = None) -> LinearCall:
    """`operands`: those of the call, or what a pass has made of them; the types are taken from these. `y`: the type of the
    product where the call has other results too."""
    flags = flags_of(call)
    x, *rest, fmt, _ = operands
    named = {"x": x}
    epsilon = float(rest.pop().value) if NORM in flags else None
    for flag, buffer in ((NORM, "squares"), (PREPARES_NORM, "norm_weight"), (RESIDUAL, "residual"), (BIAS, "bias")):
        if flag in flags:
            named[buffer] = rest.pop()
    y, glu = y or outputs_of(call)["y"], next((flag for flag in flags if flag in GLU), None)
    spec = LinearSpec(int(y.shape[-1]) * (2 if glu else 1), int(x.ty.shape[-1]), FORMATS[str(fmt.value)], phase,
                      str(x.ty.dtype), str(y.dtype), bias=BIAS in flags, residual=RESIDUAL in flags, glu=glu,
                      max_rows=constant(x.ty.shape[0]), norm_epsilon=epsilon, prepares_norm=PREPARES_NORM in flags)
    return LinearCall(spec, rest, named)


def outputs_of(call: Any) -> dict[str, Any]:
    """Types of the results by buffer name."""
    fields = call.ty.fields if PREPARES_NORM in flags_of(call) else [call.ty]
    return dict(zip(("y", "scaled", "squares"), fields, strict=False))


def phase_of(function: str, x: Any) -> str:
    """"prefill" for the many rows of a prompt, "decode" for few: those of a decode step, or picked out for their logits."""
    rows = x.ty.shape[0]
    return "prefill" if function in ("prefill", "embed") and getattr(rows, "name", "") == "t" else "decode"


def has_many_rows(function: str, x: Any) -> bool:
    """Whether a prefill step has many rows, as far as norms go; eager ones, of any number, are those above the buckets."""
    rows = constant(x.ty.shape[0])
    return phase_of(function, x) == "prefill" if rows is None else function.startswith("prefill") and rows >= MANY_ROWS


def constant(dim: Any) -> int | None:
    return int(dim) if isinstance(dim, tvm.tirx.IntImm) else None
