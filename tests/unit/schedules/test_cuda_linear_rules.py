"""The rules that pick a CUDA matmul kernel: they fit the hardware's limits for every shape we know; no compiler."""

from __future__ import annotations

import itertools

import pytest

from relaxpack.schedules.kernels.cuda.linear import CLUSTERS, few_tiling, generic_plan, hopper_plan, many_tiling

# (N, K, gated) of the main models, and awkward small ones
SHAPES = [(3072, 2048, False), (2048, 2048, False), (16384, 2048, True), (2048, 8192, False), (128256, 2048, False),
          (6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (128256, 4096, False),
          (4608, 3584, False), (3584, 3584, False), (37888, 3584, True), (3584, 18944, False), (152064, 3584, False),
          (960, 576, False), (576, 576, False), (3072, 576, True), (576, 1536, False), (49152, 576, False),
          (64, 64, False), (64, 64, True), (8, 8, False)]
ROWS = [1, 2, 7, 8, 9, 16, 24, 32, 33, 64, 96, 128, 129, 256, 512, 2048, 1 << 40]


@pytest.mark.parametrize(("n", "k", "gated"), SHAPES)
def test_tilings_stay_within_the_limits(n, k, gated):
    for rows in ROWS:
        family, options = hopper_plan(n, k, rows, gated)
        if family == "gemm_few":
            assert options["columns"] % (8 * options["share"]) == 0 and options["columns"] <= 256
            assert 1 <= options["split"] * options["share"] <= 8
            assert options["split"] <= -(-k // 64), "every block of a cluster needs a piece of K"
            assert options["columns"] >= min(rows, 128)
        elif family == "gemm_many":
            split = options.get("split", 1)
            assert options["tile_n"] % ((32 if gated else 16) * split) == 0 and options["tile_n"] <= 256
            assert options["cluster"] == 1 and split <= -(-k // 64), "every block of a cluster needs a piece of K"
        else:
            assert rows <= 8 and options["warps"] in (1, 2, 4, 8, 16)


def test_small_matrices_are_split_along_k_into_one_wave_of_clusters():
    for n, k, split in ((2048, 8192, 6), (3072, 2048, 4), (4096, 4096, 3), (4608, 3584, 3), (6144, 4096, 2),
                        (28672, 4096, 1)):
        assert few_tiling(n, k, 16)["split"] == split
        assert -(-n // 128) <= CLUSTERS[split] or split == 1
    assert few_tiling(256, 512, 16)["split"] == 2               # no block without four k tiles


def test_tiles_follow_waves():
    assert many_tiling(4096, 4096, 1024, False) == {"tile_n": 256, "cluster": 1}           # 128 tiles: one wave
    assert many_tiling(4096, 4096, 512, False)["tile_n"] == 128                            # again 128 tiles
    assert many_tiling(6144, 4096, 1024, False)["tile_n"] == 192                           # 256 tiles: two waves
    assert many_tiling(2048, 2048, 512, False)["tile_n"] == 64      # 128 tiles where wider ones leave the chip half empty
    assert many_tiling(3584, 18944, 2048, False)["tile_n"] == 224   # 256 tiles in two waves, where 256 columns need two too
    assert many_tiling(37888, 3584, 512, True)["tile_n"] == 192     # 792 tiles: six full waves
    assert many_tiling(4096, 14336, 256, False) == {"tile_n": 128, "cluster": 1, "split": 2}


def test_the_faster_family_takes_128_rows():
    assert hopper_plan(2048, 8192, 128, False)[0] == "gemm_few"     # six pieces of K, which many_tiling cannot cut
    assert hopper_plan(4096, 4096, 128, False) == ("gemm_many", {"tile_n": 64, "cluster": 1, "split": 2})
    assert hopper_plan(128256, 4096, 128, False)[0] == "gemm_few"


def test_older_architectures_use_mma_kernels_only():
    families = {generic_plan(n, k, rows, gated)[0] for (n, k, gated), rows in itertools.product(SHAPES, ROWS)}
    assert families == {"gemm_rows", "gemm_tiles"}
