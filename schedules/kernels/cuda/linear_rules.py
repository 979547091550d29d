"""The rules of CUDA matmuls: which kernel at which tiling multiplies which shape. Arithmetic over sizes and fitted times;
nothing is built here. They come from benchmarks/gpu/kernels_matmul.py on an H200 and docs/kernels_cuda.md says how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relaxpack.kernel_spec import LinearSpec
from relaxpack.schedules.kernels.cuda.many_tile import divides
from relaxpack.schedules.kernels.cuda.quantized_tilings import (
    BLOCK_ROWS,
    bulk_tiling,
    group_columns_tiling,
    quantized_few_tiling,
)
from relaxpack.weight_format import WeightFormat

MULTIPROCESSORS = 132
# Clusters of so many blocks, a block to each multiprocessor, that one H200 runs at once: a wave has no more of them.
CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}
TILE_WIDTHS = (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)       # columns of a gemm_many tile
FILL_QUANTIZED = 128            # the same for gemm_few_quant
E4M3_ROWS = 8                   # above so many rows, activations are rounded to fp8 in builds that do so
EVERY = 1 << 40                 # larger than any row count
DECODE_ROWS = (8, 32, 128, EVERY)
PREFILL_ROWS = (32, 64, 128, 256, 512, 1024, 2048, EVERY)
GENERIC_ROWS = (16, EVERY)
Plan = tuple[str, dict[str, int]]


def rule_plan(spec: LinearSpec, arch: str) -> Plan:
    """Family and tiling of the kernel for exactly `max_rows` rows; of a weight that is unpacked first, of the product."""
    assert spec.max_rows is not None
    hopper = arch == "sm_90a"
    if spec.weight.quantized and not unpacks(spec, spec.max_rows, hopper):
        return quantized_plan(spec, spec.max_rows, hopper)
    plan = hopper_plan if hopper and fits_tma(spec) else generic_plan
    return plan(spec.out_features, spec.in_features, spec.max_rows, spec.gated)


def unpacks(spec: LinearSpec, rows: int, hopper: bool) -> bool:
    """Whether a quantised weight is unpacked once before the product. Hopper's kernels read it again for every 64 rows of x,
    which takes less up to 192."""
    return rows > BLOCK_ROWS * (3 if hopper and fits_tma(spec) else 1)


def fits_tma(spec: LinearSpec) -> bool:
    """Rows of y must be multiples of 16 bytes for vector and TMA stores."""
    return spec.out_features % (16 if spec.gated else 8) == 0


def generic_plan(n: int, k: int, rows: int, gated: bool) -> Plan:
    """sm_80 and newer."""
    return _rows_plan(n, k, rows) if rows <= 16 else ("gemm_tiles", {})


def hopper_plan(n: int, k: int, rows: int, gated: bool) -> Plan:
    """Family and tiling for exactly `rows` rows (or up to them) of x, weights `[n, k]`. At 8 rows and fewer gemm_few is as
    fast alone, but in a chain its full shared memory keeps the next kernel from starting early."""
    if rows <= 8:
        return _rows_plan(n, k, rows)
    few = few_tiling(n, k, rows) if rows <= 128 else None
    if few is not None and (rows <= 64 or n > 65536):       # heads write float32, which gemm_many stores without TMA
        return "gemm_few", few
    many = many_tiling(n, k, rows, gated)
    one_wave = -(-n // 128) <= MULTIPROCESSORS
    if few is not None and one_wave and few_estimate(n, k, **few) < many_estimate(n, k, rows, many["tile_n"],
                                                                                  many.get("split", 1)):
        return "gemm_few", few
    return "gemm_many", many


def _rows_plan(n: int, k: int, rows: int) -> Plan:
    """By the chains of benchmarks/gpu/norm_fusion.py: what a kernel holds of a multiprocessor also matters to the next."""
    most = 16 if n <= 8192 else 8
    warps = next(w for w in (16, 8, 4, 2, 1) if w <= most and w * 2 * 64 <= max(k, 128))
    if rows > 8:
        return "gemm_rows", {"columns": 16, "warps": warps, "unroll": 2}
    options = {"columns": 8, "warps": warps, "unroll": 2, "blocks_per_sm": 32 // warps}     # registers of 1024 threads
    if n <= 8192 and warps == 16:
        if k > 4096:
            options |= {"unroll": 4, "blocks_per_sm": 1}
        elif n > k:
            options |= {"warps": 8, "blocks_per_sm": 3}
    elif k <= 8192 and (k > 2048 or n > 65536):
        options |= {"unroll": 1, "ahead": True}
    return "gemm_rows", options


def few_tiling(n: int, k: int, rows: int) -> dict[str, int]:
    """For up to 128 rows: strips of weight rows, each cut along K into as many pieces as leave one wave of clusters and
    12 k tiles to every block. Strips have 128 rows; for up to 64 rows of x 64, where that gives no fewer blocks."""
    columns = -(-rows // 8) * 8

    def pieces(strips: int) -> int:
        return max((s for s in range(1, 9) if (s == 1 or k // 64 // s >= 12) and strips <= CLUSTERS[s]), default=1)

    wide, narrow = -(-n // 128), -(-n // 64)
    if rows <= 64 and narrow <= MULTIPROCESSORS and narrow * pieces(narrow) >= wide * pieces(wide):
        return {"columns": columns, "consumers": 1, "split": pieces(narrow), "share": 1, "blocks_per_sm": 1}
    split = pieces(wide)
    shares = split <= 4 and -(-wide // 2) <= CLUSTERS[2 * split]
    share = 2 if rows > 32 and k >= 8192 and wide > 1 and columns % 16 == 0 and shares else 1
    per_sm = 2 if wide > MULTIPROCESSORS and columns <= 64 else 1
    return {"columns": columns, "consumers": 2, "split": split, "share": share, "blocks_per_sm": per_sm}


def many_tiling(n: int, k: int, rows: int, gated: bool) -> dict[str, int]:
    width, split = _fastest(many_estimate, TILE_WIDTHS, n, k, rows, gated, k // 64)
    return {"tile_n": width, "cluster": 1, **({"split": split} if split > 1 else {})}


def keeps_bits(n: int, width: int, split: int) -> bool:
    """Whether a column has the same bits whichever tile writes it last. The last tile of a row overlaps the one before; of
    three or more pieces of K each block adds its own first, so an order depends on where in its tile a column is."""
    return split <= 2 or n % width == 0


def _fastest(estimate: Callable[[int, int, int, int, int], float], widths: tuple[int, ...], n: int, k: int, rows: int,
             gated: bool, k_tiles: int) -> tuple[int, int]:
    """Columns of a tile and pieces of K with the least estimated time; a tie is for whole tiles."""
    rows = min(rows, 4096)
    found = [(estimate(n, k, rows, width, split) * (1.05 if split > 1 else 1), split, width)
             for width in widths for split in (1, 2, 3, 4)
             if divides(width, split, gated) and (split == 1 or (k_tiles // split >= 4 and width < 256))      # 256: spills
             and keeps_bits(n, width, split)]
    _, split, width = min(found)
    return width, split


def e4m3_tiling(n: int, k: int, rows: int, gated: bool) -> dict[str, Any]:
    """For e4m3 operands: sums are added in float32 after every 128 values of K, or 256 in narrow tiles, which would wait too
    long for them. Of 208 to 240 columns neither the sums nor their halves fit."""
    widths = tuple(width for width in TILE_WIDTHS if width <= 192 or width == 256)
    width, split = _fastest(e4m3_estimate, widths, n, k, rows, gated, k // 128)
    tiling: dict[str, Any] = {"tile_n": width, "promote": 2 if width <= 128 else 1}
    return tiling | ({"split": split} if split > 1 else {"whole_store": True} if width > 128 else {})


# Microseconds on an H200, fitted to the times of 140 tilings of 1B, 7B and 8B matmuls at 128 to 1024 rows (off by 5 % in the
# mean). A wave of blocks takes what its k tiles or the bytes of the weight take, whichever is more.
def many_estimate(n: int, k: int, rows: int, width: int, split: int) -> float:
    return _in_waves(n, k, rows, width, split, 2, 0.043 + 0.00264 * width, 0.5 + 0.036 * width * (split - 1) / split)


def e4m3_estimate(n: int, k: int, rows: int, width: int, split: int) -> float:
    """Off by 6 % in the mean of 144 timings of 1B and 8B matmuls at 16 to 4096 rows."""
    k_tile = (0.08 + 0.0026 * width) * (1.08 if width > 192 else 1)
    return _in_waves(n, k, rows, width, split, 1, k_tile, 1.4 + 0.02 * width * (split - 1) / split)


def _in_waves(n: int, k: int, rows: int, width: int, split: int, size: int, k_tile: float, ending: float) -> float:
    """Numbers of `size` bytes; `k_tile`: microseconds for 128 bytes of K; `ending`: for what comes behind them in a tile."""
    tiles = -(-rows // 128) * -(-n // width)
    waves = -(-tiles // CLUSTERS[split])
    memory = size * k * (n + rows) / _bandwidth(tiles * split / waves) / waves
    return 1.2 + waves * (max(k * size / 128 / split * k_tile, memory) + ending)


def _bandwidth(blocks: float) -> float:
    """Bytes a microsecond that so many blocks read: 120 of them are needed for all that the memory gives."""
    return 3.7e6 * min(1.0, blocks / 120)


def few_estimate(n: int, k: int, columns: int, split: int, share: int, **_: int) -> float:
    """One wave of gemm_few in strips of 128."""
    product = k / 64 / split * (0.23 + 0.00136 * columns)
    reduction = columns / 128 * (2.3 + 0.46 * max(split - 3, 0)) if split > 1 else 0.0
    return (2.2 if share == 2 else 3.7) + max(product, 2 * k * n / 3.7e6) + reduction


def quantized_plan(spec: LinearSpec, rows: int, hopper: bool) -> tuple[str, dict[str, Any]]:
    """Kernel and options for rows of x at which a packed weight is not unpacked."""
    n, k, weight = spec.out_features, spec.in_features, spec.weight
    if rows == 1 and weight.bits == 4:
        return "gemm_group_columns", group_columns_tiling(n, k, rows)
    if hopper and rows <= 8 and k >= 2048 and (weight.bits == 8 or weight.scale_dtype == "float32" or n > 65536):
        return "gemm_rows_bulk", bulk_tiling(n, k, rows, weight)
    if hopper and rows > 8 and fits_tma(spec):
        return quantized_few_tiling(n, k, rows, weight)
    if rows <= 8 or weight.group_size == 16:
        columns, heavy = 8 if rows <= 8 else 16, weight.minimum == "stored" and weight.scale_dtype == "float32"
        if k < 2048:
            return "gemm_rows_quant", {"columns": columns, "warps": 4, "unroll": 2}
        if columns == 8 and weight.group_size == 16:
            return "gemm_rows_quant", {"columns": 8, "warps": 16, "unroll": 2, "ahead": True}
        if columns == 8 and not heavy:
            return "gemm_rows_quant", {"columns": 8, **rows_tiling(n, k, weight)}
        return "gemm_rows_quant", {"columns": columns, "warps": 8, "unroll": 4 if heavy and n <= 8192 else 2}
    strips = 2 if n >= 8192 else 1
    blocks = -(-n // (128 * strips))
    split = max(1, min(8, FILL_QUANTIZED // blocks, k // 64 // 4)) if hopper else 1
    return "gemm_few_quant", {"columns": -(-rows // 8) * 8, "strips": strips, "warps": 8, "split": split}


def rows_tiling(n: int, k: int, weight: WeightFormat) -> dict[str, Any]:
    """Tiling of gemm_rows_quant for up to 8 rows. blocks_per_sm is what decides: 65 registers instead of 64 leave a block of
    16 warps alone on its multiprocessor, which costs a third."""
    if n > 8192:
        if weight.bits == 8:
            return {"warps": 8, "unroll": 2, "blocks_per_sm": 4}
        if weight.minimum == "stored":              # two strips share the sums of x
            return {"warps": 8, "unroll": 1, "strips": 2, "blocks_per_sm": 4}
        if weight.zeros:
            return {"warps": 8, "unroll": 2, "blocks_per_sm": 4}
        return {"warps": 8, "unroll": 4, "blocks_per_sm": 3}
    if n > k:
        return {"warps": 8, "unroll": 2, "blocks_per_sm": 3}
    if weight.bits == 8:
        return {"warps": 16, "unroll": 1, "ahead": True, "blocks_per_sm": 2}
    return {"warps": 16, "unroll": 2, "blocks_per_sm": 2}
