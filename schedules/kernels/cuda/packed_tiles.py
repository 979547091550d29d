"""Packed weights by TMA: the maps of their codes, scales and minimums, made on the host, and the copies of one stage of K
for the strips of a block, which one thread asks for. What lies where in shared memory: codes_scaled.py. No kernel here.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401  (before tvm)
from relaxpack.schedules.kernels.cuda.codes_scaled import ScaledCodes
from relaxpack.schedules.kernels.cuda.gemm_few import EVICT_FIRST, TMA_LOAD
from tvm.script import tirx as T


class PackedTiles:
    """Of a weight with `in_all` strips of 16 rows and `chunks` chunks of 64 values of K, of which a block has `strips`.
    `beside`: bytes that others bring to the same stage; `map_codes` and `map_scales` (of minimums too) fill a tensormap."""

    def __init__(self, codes: ScaledCodes, in_all: int, chunks: int, strips: int, beside: int = 0) -> None:
        CW, SW = codes.code_words, codes.scale_words
        BOX = min(CW, 256)                              # words of a TMA box
        code_columns, scale_columns = chunks * codes.weight.bits * 32, codes.scale_columns(chunks)
        stored, whole_row = codes.stored, codes.whole_row
        code_bytes, scale_bytes = strips * CW * 4, strips * SW * (2 if stored else 1) * 4

        @T.inline
        def map_codes(tensormap, buffer):
            T.call_packed("runtime.cuTensorMapEncodeTiled", tensormap, "uint32", 2, buffer.data,
                          code_columns, in_all, code_columns * 4, BOX, strips, 1, 1, 0, 0, 3, 0)

        @T.inline
        def map_scales(tensormap, buffer):
            T.call_packed("runtime.cuTensorMapEncodeTiled", tensormap, "uint32", 2, buffer.data,
                          scale_columns, in_all, scale_columns * 4, SW, strips, 1, 1, 0, 0, 3, 0)

        @T.inline
        def expect(full, slot, size):
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(full.ptr_to([slot]), T.uint32(size))

        @T.inline
        def copy_codes(slot, stage, tile, full, maps, Cs):
            for e in T.unroll(CW // BOX):
                T.ptx[TMA_LOAD](Cs.ptr_to([slot, e * (strips * BOX)]), T.address_of(maps[0]), stage * CW + e * BOX,
                                tile * strips, full.ptr_to([slot]), T.uint64(EVICT_FIRST))

        @T.inline
        def copy_scales(slot, stage, tile, full, maps, Ss, Ms):
            if not whole_row:
                T.ptx[TMA_LOAD](Ss.ptr_to([slot, 0]), T.address_of(maps[1]), stage * SW, tile * strips, full.ptr_to([slot]),
                                T.uint64(EVICT_FIRST))
            if stored:
                T.ptx[TMA_LOAD](Ms.ptr_to([slot, 0]), T.address_of(maps[2]), stage * SW, tile * strips, full.ptr_to([slot]),
                                T.uint64(EVICT_FIRST))

        @T.inline
        def load(slot, stage, tile, full, maps, Cs, Ss, Ms):
            """`maps`: of codes, scales and minimums, as far as there are any; `full`: the barriers of the ring."""
            expect(full, slot, code_bytes + scale_bytes + beside)
            copy_codes(slot, stage, tile, full, maps, Cs)
            copy_scales(slot, stage, tile, full, maps, Ss, Ms)

        @T.inline
        def load_codes(slot, stage, tile, full, maps, Cs, Ss, Ms):
            """The codes alone, as an arrival of their own."""
            expect(full, slot, code_bytes)
            copy_codes(slot, stage, tile, full, maps, Cs)

        @T.inline
        def load_scales(slot, stage, tile, full, maps, Cs, Ss, Ms):
            """The scales and minimums alone."""
            expect(full, slot, scale_bytes)
            copy_scales(slot, stage, tile, full, maps, Ss, Ms)

        self.map_codes, self.map_scales = map_codes, map_scales
        self.load, self.load_codes, self.load_scales = load, load_codes, load_scales
