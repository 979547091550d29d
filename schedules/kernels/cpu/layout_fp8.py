"""How the CPU kernels want fp8 weights: panels of 32 output rows as in `layout.py`, one byte a number.

`uint8[N/32, groups, record]`; a record holds the codes of its group as `[k][32 rows]`, then 32 float32 scales times 256. A
group is a whole row (fp8) or 128 columns (fp8_block, the last one padded with zeros). The factor is there because kernels
read a code as the float16 that has the same bits one place lower, which is the number divided by 256, exactly.
"""

from __future__ import annotations

import numpy as np

from relaxpack.errors import CompileError
from relaxpack.kernel_spec import WeightLayout
from relaxpack.weight_format import WHOLE_ROW, QuantizedTensor, WeightFormat

from .layout import HALF, PANEL, panel_rows, panels

SCALE_FACTOR = 256
SCALE_BYTES = PANEL * 4


def group_columns(weight: WeightFormat, in_features: int) -> int:
    """Columns of a record."""
    return in_features if weight.group_size == WHOLE_ROW else weight.group_size


def weight_layout(weight: WeightFormat, out_features: int, in_features: int, gated: bool) -> WeightLayout:
    """One buffer u8[panels, groups of columns, codes and then scales of 32 rows]."""
    if gated and out_features % 2:
        raise CompileError(f"gate and up rows together must be even, got {out_features}")
    record = group_columns(weight, in_features) * PANEL + SCALE_BYTES
    shape = (panels(out_features, gated), weight.groups(in_features), record)
    return WeightLayout(f"cpu.{weight.name}.panel32" + (".gate_up" if gated else ""), (("", shape, "uint8"),))


def pack(layout: WeightLayout, weight: np.ndarray | QuantizedTensor) -> dict[str, np.ndarray]:
    """See KernelProvider.pack."""
    (suffix, shape, _), = layout.buffers
    _, name, _, *rest = layout.name.split(".")
    assert isinstance(weight, QuantizedTensor) and weight.format.name == name, f"{layout.name}: wrong format"
    (count, groups, record), gate_up = shape, bool(rest)
    columns = (record - SCALE_BYTES) // PANEL
    with np.errstate(over="ignore"):
        scales = weight.scales * np.float32(SCALE_FACTOR)
    if not np.isfinite(scales).all():
        raise CompileError(f"{name}: a scale of {np.abs(weight.scales).max():g} is too large for the CPU kernels")
    codes = np.pad(weight.codes, ((0, 0), (0, groups * columns - weight.codes.shape[1])))
    packed = np.empty(shape, np.uint8)
    rows = panel_rows(codes, gate_up).reshape(count, 2 * HALF, groups, columns)
    packed[:, :, :-SCALE_BYTES] = rows.transpose(0, 2, 3, 1).reshape(count, groups, columns * PANEL)
    lanes = panel_rows(scales, gate_up).reshape(count, PANEL, groups).transpose(0, 2, 1)
    packed[:, :, -SCALE_BYTES:] = np.ascontiguousarray(lanes).view(np.uint8)
    return {suffix: packed}
