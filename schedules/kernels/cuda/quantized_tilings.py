"""Which tiling of which Hopper kernel multiplies a quantised weight: rules from benchmarks/gpu/quantised_matmul.py on an
H200 (docs/kernels_cuda.md), and all tilings that fit, for tuning. Numbers only, no kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from relaxpack.schedules.kernels.cuda.gemm_few_bulk import most_feeders, stages_that_fit
from relaxpack.schedules.kernels.cuda.gemm_mixed import fits
from relaxpack.schedules.kernels.cuda.rows_product import register_sets
from relaxpack.weight_format import WHOLE_ROW, WeightFormat

MULTIPROCESSORS = 132
BLOCK_ROWS = 64         # most rows of x in a block of the kernels for 9 rows and more
FILL = 96               # blocks to a place on each multiprocessor: clusters of more do not all fit on the chip at once
Options = dict[str, Any]


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def group_columns_tiling(n: int, k: int, rows: int) -> Options:
    """gemm_group_columns for 1 to 4 rows, by chains of whole layers. A short row of K is under way as a whole; a long one
    is cut into rounds of so many warps that the last is nearly full. Registers must not spill: blocks_per_sm bounds them."""
    columns = 1 if rows == 1 else 2 if rows == 2 else 4
    units = ceildiv(k, 256)
    if units < 16:
        warps, ahead, per_sm = next(w for w in (8, 4, 2, 1) if w <= units), False, 3
    elif k > 8192:
        warps = max(range(12, 17), key=lambda w: (units / (ceildiv(units, w) * w), w))
        ahead, per_sm = False, 2
    else:
        warps, ahead, per_sm = 8, n <= 8192 or units > 16, 4 if n > 8192 else 2
    return {"columns": columns, "warps": warps, "unroll": columns, "ahead": ahead, "blocks_per_sm": per_sm}


def bulk_tiling(n: int, k: int, rows: int, weight: WeightFormat) -> Options:
    """gemm_rows_bulk for 1 to 8 rows: long rows by many warps, many short ones by small blocks, while there is one row."""
    if weight.bits == 4 and k > 8192:
        warps, unroll, stages, per_sm = 16, 2, 2, 2
    elif weight.bits == 8 and (k > 8192 or n > 4096):
        warps, unroll, stages, per_sm = 16, 4, 1, 2
    elif weight.bits == 8:
        warps, unroll, stages, per_sm = 8, 4, 2, 3
    elif n > 8192 and rows <= 2 and weight.scale_dtype == "float16":
        warps, unroll, stages, per_sm = 4, 4, 4, 4
    elif n > 8192 and weight.minimum != "stored" and rows > 4:
        warps, unroll, stages, per_sm = 8, 4, 2, 3
    else:
        warps, unroll, stages, per_sm = 8, 2, 4, 3
    return {"columns": 8, "warps": warps, "unroll": unroll, "stages": stages, "blocks_per_sm": per_sm}


def rows_of_block(rows: int) -> int:
    """Rows of x that a block has where so many are shared out among as few as can have them."""
    return ceildiv(rows, ceildiv(rows, BLOCK_ROWS))


def quantized_few_tiling(n: int, k: int, rows: int, weight: WeightFormat) -> tuple[str, Options]:
    """Kernel and tiling for 9 rows and more. gemm_mixed is faster than gemm_few_bulk for many weight rows and more than 32
    rows of x in a block, or more than 16 where a row of the weight has one scale, which costs gemm_mixed nothing."""
    block = rows_of_block(rows)
    if block > (16 if weight.group_size == WHOLE_ROW else 32) and ceildiv(n, 16) > 4 * MULTIPROCESSORS:
        return "gemm_mixed", mixed_tiling(n, k, min(rows, BLOCK_ROWS), weight)
    return "gemm_few_bulk", few_bulk_tiling(n, k, block, weight)


def few_bulk_tiling(n: int, k: int, rows: int, weight: WeightFormat) -> Options:
    """One wave of blocks, each with all of K where that is short; as many groups of warps as registers allow, of which the
    warps that feed them need theirs. A long K is cut in two where clusters of two fit in the wave: half the stages, and
    half the x, for each block. Minimums cost sums of x, which strips of a warp share, and registers; above 16 rows weights
    that have their scales and minimums in them cost less."""
    columns, total, one_scale = -(-rows // 8) * 8, ceildiv(n, 16), weight.group_size == WHOLE_ROW
    strips, split, per_sm, feeders = 1, 1, 1, most_feeders(weight)
    stored = weight.minimum == "stored"
    if total > 8 * MULTIPROCESSORS:
        warps, strips, groups, per_sm, feeders = 4, 2, 1 if rows > 16 or stored else 2, 2, 1
    elif k > 8192 and 128 <= total <= 2 * MULTIPROCESSORS:
        warps, groups, split = 4, 3, 2
        if stored and rows <= 16:
            warps, strips, groups, feeders = 2, 2, 5, 2
    else:
        warps = ceildiv(total, MULTIPROCESSORS)
        if warps == 3 and rows <= 16 and weight.bits == 4 and not stored:
            warps, strips, groups = 1, 3, 11
        else:
            if warps == 8:
                warps, strips = 4, 2
            room = 12 if rows > 32 else 22 if one_scale and rows <= 16 and warps == 2 else 15       # warps of groups
            if 16 < rows <= 32 or (rows <= 16 and stored):          # so many warps have the registers that products want
                room, feeders = 12 if stored and weight.bits == 8 else 14, 2
            groups = max(1, min(room // warps, ceildiv(k, 256)))
    while groups > 1 and stages_that_fit(weight, columns, warps, strips, groups, per_sm) < 2 * groups:
        groups -= 1
    return {"columns": columns, "strips": strips, "warps": warps, "split": split, "blocks_per_sm": per_sm,
            "feeders": feeders, "groups": groups, "scaled": rows > (16 if stored else 32)}


def mixed_tiling(n: int, k: int, rows: int, weight: WeightFormat) -> Options:
    """gemm_mixed for 9 to 64 rows in a block: pieces of K until the chip is full."""
    columns = -(-rows // 8) * 8
    shapes = [(2, 2, 1), (2, 1, 1)]
    consumers, strips, per_sm = next(shape for shape in shapes if fits(weight, columns, *shape))
    blocks = -(-n // (64 * consumers * strips))
    split = max(1, min(6, FILL * per_sm // blocks, k // 128 // 4))
    return {"columns": columns, "strips": strips, "consumers": consumers, "split": split, "blocks_per_sm": per_sm}


def bulk_tilings(k: int, rows: int, weight: WeightFormat) -> Iterator[Options]:
    """Copies of a warp no longer than its share of K, and what is under way fits the shared memory."""
    scales = 0 if weight.group_size == WHOLE_ROW else 64 / weight.group_size
    size = 4 if weight.scale_dtype == "float32" or weight.zeros else 2
    chunk = 128 * weight.bits + 16 * scales * size * (2 if weight.minimum == "stored" else 1)      # bytes of 16 x 64 values
    for warps, per_sm in ((4, 4), (8, 3), (8, 4), (16, 2)):
        for unroll in (2, 4):
            pieces = ceildiv(k, 64 * unroll)
            for stages in (1, 2, 4, 8):
                block = warps * (stages * unroll * chunk + 800)
                if (warps <= pieces and stages <= ceildiv(pieces, warps) and 4 <= unroll * stages <= 16
                        and block <= 225 * 1024 / per_sm):
                    yield {"columns": 8 if rows <= 8 else 16, "warps": warps, "unroll": unroll, "stages": stages,
                           "blocks_per_sm": per_sm}


def group_columns_tilings(k: int, rows: int) -> Iterator[Options]:
    """gemm_group_columns for 1 to 4 rows: no more under way than there is of K, and than registers hold."""
    columns = 1 if rows == 1 else 2 if rows == 2 else 4
    units = ceildiv(k, 256)
    for ahead in (False, True, 2, 3):
        for warps in (2, 4, 7, 8, 14, 16):
            for unroll in (1, 2):
                for threads in (512, 768, 1024):
                    flying = unroll * register_sets(ceildiv(units, warps * unroll), ahead)
                    if threads // 32 >= warps and warps * flying <= units and flying * 20 <= 65536 // threads - 36:
                        yield {"columns": columns, "warps": warps, "unroll": unroll * columns, "ahead": ahead,
                               "blocks_per_sm": threads // 32 // warps}


def few_bulk_tilings(n: int, k: int, rows: int, weight: WeightFormat) -> Iterator[Options]:
    """gemm_few_bulk: one wave of blocks that fills most of the chip, every warp with enough of K, registers for its sums."""
    columns = ceildiv(rows_of_block(rows), 8) * 8
    for warps in (1, 2, 3, 4, 6, 7):
        for strips in (1, 2, 3):
            tiles = ceildiv(n, 16 * warps * strips)
            for groups in (1, 2, 3, 4, 5, 7, 11, 15):
                for split in (1, 2, 3, 4, 6):
                    for per_sm, feeders in itertools.product((1, 2), range(1, most_feeders(weight) + 1)):
                        threads = ceildiv(warps * groups + feeders, 4) * 128 * per_sm
                        blocks = tiles * split
                        wave = blocks <= MULTIPROCESSORS * per_sm or (split == 1 and warps * strips >= 7)
                        if (0.7 * MULTIPROCESSORS <= blocks and wave and k // 128 // split >= 2 * groups
                                and 256 <= threads <= 1024 and strips * columns // 2 + 96 <= 65536 // threads
                                and stages_that_fit(weight, columns, warps, strips, groups, per_sm) >= max(2 * groups, 3)):
                            for scaled in (False, True) if rows > 16 else (False,):
                                yield {"columns": columns, "strips": strips, "warps": warps, "split": split,
                                       "blocks_per_sm": per_sm, "groups": groups, "scaled": scaled,
                                       "feeders": feeders}


def mixed_tilings(n: int, k: int, rows: int, weight: WeightFormat) -> Iterator[Options]:
    """Enough blocks to fill the chip, and not much more than one wave of them."""
    whole, block = ceildiv(rows, 8) * 8, ceildiv(rows_of_block(rows), 8) * 8
    for columns in sorted({min(whole, 256), *([128] if whole > 128 else []), *([64, block] if 64 < whole <= 256 else [])}):
        for consumers, strips, per_sm in ((2, 1, 2), (1, 1, 2), (2, 2, 1), (4, 1, 1), (2, 1, 1)):
            if not fits(weight, columns, consumers, strips, per_sm) or (per_sm == 1 and columns < 32):
                continue
            blocks, slots = -(-n // (64 * consumers * strips)) * -(-rows // columns), MULTIPROCESSORS * per_sm
            for split in (1, 2, 3, 4, 6, 8):
                if split == 1 or (k // 128 // split >= 4 and blocks * split <= 1.1 * slots):
                    if blocks * split >= 0.4 * slots or split == 8:
                        yield {"columns": columns, "strips": strips, "consumers": consumers, "split": split,
                               "blocks_per_sm": per_sm}
