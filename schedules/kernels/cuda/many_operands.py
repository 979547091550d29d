"""What `gemm_many` multiplies: 16-bit numbers, or float8 e4m3 codes whose float32 scales are applied to the sums. A k tile
is 128 bytes of a row either way, so the ring, the tile and four wgmma a k tile are the same; no kernels here.

The codes of the weight are read in the one order that all kernels for fp8 share (packing.py): blocks of 8 rows x 64 bytes
whose 16-byte pieces are where wgmma's 64-byte swizzle wants them. The codes of x are in the same order of K
(quantize_rows.py), which is all that a product asks of it.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.common import SHORT, finish, fragment_sizes, optional, with_handles
from relaxpack.schedules.kernels.cuda.gemm_few import DESC, SW128
from relaxpack.schedules.kernels.cuda.many_tile import BM, WG
from relaxpack.weight_format import FORMATS
from tvm.script import tirx as T

TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
TMA_LOAD_3D = TMA_LOAD.replace("2d", "3d")
TMA_MULTICAST = TMA_LOAD + ".multicast::cluster"
SW64_DESC = (2 << 62) | (32 << 32) | (1 << 16)      # K-major, 64-byte swizzle, 8-row groups 512 bytes apart
DESCRIPTOR = """
__device__ __forceinline__ unsigned long long descriptor(unsigned upper, unsigned lower) {
  return (unsigned long long)upper << 32 | lower; }
"""


class FloatOperands:
    """x[t, K] and weight[N, K] of `dtype`; `share` blocks of a cluster load a weight tile together."""

    values, tail, weights = 64, (1, 1, 0, 0), DESC      # of K in a k tile; signs and transposes; descriptor of weights

    def __init__(self, N: int, K: int, dtype: str, tile_n: int, share: int) -> None:
        self.dtype, self.rows = dtype, N            # rows: of the weight as stored
        columns, bk, shared = tile_n // share, self.values, share > 1

        @T.inline
        def encode(x_map, w_map, x, weight, t):
            T.call_packed("runtime.cuTensorMapEncodeTiled", x_map, dtype, 2, x.data,
                          K, t, K * 2, bk, T.min(t, BM), 1, 1, 0, SW128, 2, 0)
            T.call_packed("runtime.cuTensorMapEncodeTiled", w_map, dtype, 2, weight.data,
                          K, N, K * 2, bk, columns, 1, 1, 0, SW128, 2, 0)

        @T.inline
        def load_weights(Bs, slot, w_map, kt, column0, member, full):
            if shared:
                T.ptx[TMA_MULTICAST](Bs.ptr_to([slot, member * (columns * bk)]), T.address_of(w_map), kt * bk,
                                     column0 + member * columns, full.ptr_to([slot]), T.uint16((1 << share) - 1))
            else:
                T.ptx[TMA_LOAD](Bs.ptr_to([slot, 0]), T.address_of(w_map), kt * bk, column0, full.ptr_to([slot]))

        self.encode, self.load_weights = encode, load_weights

    def mma(self, columns: int) -> str:
        return f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{SHORT[self.dtype]}.{SHORT[self.dtype]}"

    def at(self, k: int, first: int) -> int:
        """Where the k-th 32 bytes of K of column `first` begin in the weights of a stage, in descriptor units."""
        return first * 128 // 16 + k * 2


class E4M3Operands:
    """x: codes u8[t, K padded to 64] and scales f32[t]; weight: codes and scales of the format `fp8` as packed."""

    values, tail, weights = 128, (1, 1), SW64_DESC

    def __init__(self, N: int, K: int, tile_n: int) -> None:
        strips, chunks, bk = -(-N // 16), -(-K // 64), self.values
        self.tile_n, self.rows = tile_n, strips * 16

        @T.inline
        def encode(x_map, w_map, x, weight, t):
            T.call_packed("runtime.cuTensorMapEncodeTiled", x_map, "uint8", 2, x[0].data,
                          chunks * 64, t, chunks * 64, bk, T.min(t, BM), 1, 1, 0, SW128, 2, 0)
            T.call_packed("runtime.cuTensorMapEncodeTiled", w_map, "uint32", 3, weight[0].data,
                          256, strips, chunks, chunks * 1024, 1024, 256, tile_n // 16, 2, 1, 1, 1, 0, 0, 2, 0)

        @T.inline
        def load_weights(Bs, slot, w_map, kt, column0, member, full):
            T.ptx[TMA_LOAD_3D](Bs.ptr_to([slot, 0]), T.address_of(w_map), 0, column0 // 16, kt * 2, full.ptr_to([slot]))

        self.encode, self.load_weights = encode, load_weights

    def mma(self, columns: int) -> str:
        return f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"

    def at(self, k: int, first: int) -> int:
        return k // 2 * (self.tile_n * 64 // 16) + first * 64 // 16 + k % 2 * 2


class RowScales:
    """The scales of a tile: `fetch` asks for them while its first k tiles come, `put` shows those of the weight to the
    warpgroup while the last ones are multiplied, `apply` multiplies the sums. A warpgroup has the scales of the `width`
    columns that its block finishes in shared memory."""

    def __init__(self, operands: E4M3Operands, width: int) -> None:
        self.width, self.held = width, -(-width // WG)      # scales of columns that a thread fetches
        width, held, weight_rows = self.width, self.held, operands.rows

        @T.inline
        def fetch(held_scales, x, weight, row0, first, tx, rows):
            for j in T.unroll(held):
                column = T.meta_var(tx % WG + j * WG)
                place = T.meta_var(first + column)
                held_scales[j] = T.float32(0)
                if T.And(column < width, place < weight_rows):
                    held_scales[j] = weight[1][place]
            for h in T.unroll(2):
                row = T.meta_var(row0 + tx // 32 * 16 + tx % 32 // 4 + h * 8)
                held_scales[held + h] = T.float32(0)
                if row < rows:
                    held_scales[held + h] = x[1][row]

        @T.inline
        def put(held_scales, of_columns, tx):
            for j in T.unroll(held):
                if tx % WG + j * WG < width:
                    of_columns[tx // WG, tx % WG + j * WG] = held_scales[j]
            T.ptx["bar.sync"](T.Cast("uint32", tx // WG + 1), T.uint32(WG))

        @T.inline
        def apply(c, held_scales, of_columns, four, tx):
            for i in T.unroll(width // 16):
                T.ptx["ld.shared.v4.f32"](four[0], four[1], four[2], four[3],
                                          of_columns.ptr_to([tx // WG, i * 16 + tx % 4 * 4]))
                for half in T.unroll(2):
                    for h in T.unroll(2):
                        for e in T.unroll(2):
                            o = T.meta_var(i * 8 + half * 4 + h * 2 + e)
                            c[o] = c[o] * four[e * 2 + half] * held_scales[held + h]

        self.fetch, self.put, self.apply = fetch, put, apply


def e4m3_func(body, N: int, K: int, dtype: str, out_dtype: str, name: str, *, cluster: int = 1, bias: bool = False,
              residual: bool = False, glu: str | None = None, dependent_launch: bool = False, **_):
    """`linear_func` for e4m3 operands: x codes, x scales, weight codes, weight scales, [bias], [residual] → y."""
    words, groups = fragment_sizes(FORMATS["fp8"], N, K)
    OUT, padded = N // 2 if glu else N, -(-K // 64) * 64

    @T.inline
    def bind(handles):
        t = T.int64()
        x_codes = T.match_buffer(handles[0], (t, padded), "uint8", align=16)
        x_scales = T.match_buffer(handles[1], (t,), "float32", align=16)
        codes = T.match_buffer(handles[2], (words,), "uint32", align=16)
        scales = T.match_buffer(handles[3], (groups,), "float32", align=16)
        bias_buffer = T.meta_var(optional(bias, "bias", handles[4], (N,), "float32"))
        residual_buffer = T.meta_var(optional(residual, "residual", handles[4 + bias], (t, OUT), dtype))
        y = T.match_buffer(handles[-1], (t, OUT), out_dtype, align=16)
        x = T.meta_var((x_codes, x_scales))
        weight = T.meta_var((codes, scales))
        body(x, weight, bias_buffer, residual_buffer, y, t)

    return finish(with_handles(5 + bias + residual, bind), name, dependent_launch, cluster)
