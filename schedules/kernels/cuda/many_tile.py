"""The sizes of a tile of `gemm_many`: columns and float32 sums of each block, boxes of TMA stores, stages of the ring, and
what fits. Numbers only, no kernels."""

from __future__ import annotations

BM, WG, CONSUMERS = 128, 128, 2            # rows of a tile; threads of a warpgroup; warpgroups that multiply
BK = 64                                     # a k tile is 128 bytes of a row, as many as 64 numbers of 16 bits
SHARED_LIMIT = 227 * 1024
BOX_SWIZZLE = {64: 3, 32: 2, 16: 1}         # columns of a store box → swizzle of its rows of 128, 64 or 32 bytes


def divides(tile_n: int, split: int, gated: bool) -> bool:
    """Whether `split` blocks can share the columns of a tile: parts of whole boxes, of which two may overlap."""
    step = 32 if gated else 16
    return tile_n % step == 0 and (split <= 2 or tile_n % (step * split) == 0)


class ManyTile:
    """BM x `tile_n` of y[t, N], of which each of `split` blocks along K brings `width` columns to their end, the next one
    from `stride` columns further on. Two halves may overlap, where a tile is not twice a whole number of boxes: both blocks
    then store the columns between, with the same bits, since a + b is b + a. `values`: of K in a k tile; `tma_store`: y
    leaves by TMA, with `whole_store` a tile at once, which takes shared memory from the ring."""

    def __init__(self, N: int, K: int, *, values: int, tile_n: int, split: int, gated: bool, tma_store: bool,
                 whole_store: bool) -> None:
        self.columns, self.split, self.gates = tile_n, split, 2 if gated else 1
        self.out_features = N // self.gates
        step = 16 * self.gates
        self.width = -(-tile_n // (step * split)) * step
        self.stride = tile_n - self.width if split == 2 else self.width
        self.outputs = self.width // self.gates                 # columns of y that a block stores
        assert tile_n <= 256 and 1 <= split <= 8 and N % (8 * self.gates) == 0 and K % 8 == 0
        assert divides(tile_n, split, gated)
        self.sums, self.own_sums = 64 * tile_n // WG, 64 * self.width // WG     # of a thread: of the tile, of its part
        self.k_tiles, self.tiles = -(-K // values), -(-N // tile_n)
        self.tma_store, self.whole_store = tma_store, whole_store and tma_store
        self.box = next(columns for columns in BOX_SWIZZLE if self.outputs % columns == 0)      # columns of one TMA store
        self.boxes = self.outputs // self.box
        self.boxes_wg = self.boxes if self.whole_store else 2   # boxes in shared memory of a warpgroup
        stored = CONSUMERS * self.boxes_wg * 64 * self.box * 2 if tma_store else 0
        stage_bytes = (BM + tile_n) * BK * 2
        self.stages = min((SHARED_LIMIT - stored - 2048) // stage_bytes, max(-(-self.k_tiles // split), 2))
        self.staging_shape = (CONSUMERS * self.boxes_wg, 64 * self.box) if tma_store else (1, 16)
        self.parts_shape = ((split - 1) * self.own_sums // 4 * CONSUMERS * WG * 4,) if split > 1 else (4,)
        assert self.parts_shape[0] * 4 <= self.stages * stage_bytes
