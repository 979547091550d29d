"""How the results of `gemm_many` leave the registers: through shared memory and TMA, box by box or a tile at once, or where
y is wider than the activations by the threads themselves. No kernel lives here."""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.fragments import pack
from relaxpack.schedules.kernels.cuda.many_residual import swizzle
from relaxpack.schedules.kernels.cuda.many_tile import WG, ManyTile
from tvm.script import tirx as T

TMA_STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
STMATRIX = "stmatrix.sync.aligned.m8n8.x4.shared.b16"


def store_of(tile: ManyTile, dtype: str, out_dtype: str, whole: bool, scaled: bool) -> Any:
    """`store(c, word, staging, y_map, y, row0, column, rows, wid, tx, lane)`: the sums of a block's columns to y, from
    (`row0`, `column`) on. `whole`: there are no columns behind the last; `scaled`: the sums had scales of their own."""
    EB, BO, BOXES_WG, OUT, PACK = tile.box, tile.outputs, tile.boxes_wg, tile.out_features, pack(dtype)

    @T.inline
    def boxes(c, word, staging, y_map, y, row0, column, rows, wid, tx, lane):
        wg = T.meta_var(wid // 4)
        for b in T.unroll(BO // EB):
            box = T.meta_var(wg * 2 + b % 2)
            if tx % WG == 0:
                T.ptx["cp.async.bulk.wait_group.read"](T.min(b, 1))
            T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))
            for j in T.unroll(EB // 16):
                row = T.meta_var(wid % 4 * 16 + lane % 16)
                chunk = T.meta_var(swizzle(j * 2 + lane // 16, lane, EB))
                o = T.meta_var(b * (EB // 2) + j * 8)
                for e in T.unroll(4):
                    T.ptx[PACK](word[e], c[o + e * 2 + 1], c[o + e * 2])
                T.ptx[STMATRIX](staging.ptr_to([box, row * EB + chunk * 8]), word[0], word[1], word[2], word[3])
            T.ptx.fence.proxy.async_.shared__cta()
            T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))
            if tx % WG == 0:
                T.ptx[TMA_STORE](T.address_of(y_map), column + b * EB, row0 + wg * 64, staging.ptr_to([box, 0]))
                T.ptx["cp.async.bulk.commit_group"]()

    @T.inline
    def at_once(c, word, staging, y_map, y, row0, column, rows, wid, tx, lane):
        wg = T.meta_var(wid // 4)
        if tx % WG == 0:
            T.ptx["cp.async.bulk.wait_group.read"](0)
        T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))
        for b in T.unroll(BO // EB):
            for j in T.unroll(EB // 16):
                row = T.meta_var(wid % 4 * 16 + lane % 16)
                o = T.meta_var(b * (EB // 2) + j * 8)
                for e in T.unroll(4):
                    T.ptx[PACK](word[e], c[o + e * 2 + 1], c[o + e * 2])
                at = T.meta_var(row * EB + swizzle(j * 2 + lane // 16, lane, EB) * 8)
                T.ptx[STMATRIX](staging.ptr_to([wg * BOXES_WG + b, at]), word[0], word[1], word[2], word[3])
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))
        if tx % WG == 0:
            for b in T.unroll(BO // EB):
                T.ptx[TMA_STORE](T.address_of(y_map), column + b * EB, row0 + wg * 64,
                                 staging.ptr_to([wg * BOXES_WG + b, 0]))
            T.ptx["cp.async.bulk.commit_group"]()

    @T.inline
    def by_threads(c, word, staging, y_map, y, row0, column, rows, wid, tx, lane):
        wg = T.meta_var(wid // 4)
        if scaled:
            T.ptx["bar.sync"](T.Cast("uint32", wg + 1), T.uint32(WG))   # nobody reads the scales any more
        for h in T.unroll(2):
            row = T.meta_var(row0 + wid * 16 + lane // 4 + h * 8)
            if row < rows:
                for i in T.unroll(BO // 8):
                    for e in T.unroll(2):
                        n = T.meta_var(column + i * 8 + lane % 4 * 2 + e)
                        if T.bool(True) if whole else n < OUT:
                            y[row, n] = T.Cast(out_dtype, c[i * 4 + h * 2 + e])

    return at_once if tile.whole_store else boxes if tile.tma_store else by_threads
