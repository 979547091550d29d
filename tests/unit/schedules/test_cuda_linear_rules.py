"""The rules that pick a CUDA matmul kernel: they fit the hardware's limits for every shape we know; no compiler."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from relaxpack.kernel_spec import LinearSpec
from relaxpack.schedules.kernels.cuda.gemm_few_bulk import most_feeders, stages_that_fit
from relaxpack.schedules.kernels.cuda.linear import NORM_FAMILIES, linear
from relaxpack.schedules.kernels.cuda.linear_rules import (
    CLUSTERS,
    few_tiling,
    generic_plan,
    hopper_plan,
    many_tiling,
    quantized_plan,
    rule_plan,
)
from relaxpack.schedules.kernels.cuda.many_tile import divides
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.schedules.kernels.cuda.quantized_tilings import group_columns_tiling, quantized_few_tiling
from relaxpack.schedules.tuning.cuda_linear_spaces import linear_space
from relaxpack.target import TargetSpec
from relaxpack.weight_format import FORMATS

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
            assert divides(options["tile_n"], split, gated) and options["tile_n"] <= 256
            assert options["cluster"] == 1 and split <= -(-k // 64), "every block of a cluster needs a piece of K"
        else:
            assert rows <= 8 and options["warps"] in (1, 2, 4, 8, 16)


def test_small_matrices_are_split_along_k_into_one_wave_of_clusters():
    for n, k, consumers, split in ((2048, 8192, 1, 3), (3072, 2048, 1, 2), (4096, 4096, 1, 2), (4608, 3584, 2, 3),
                                   (6144, 4096, 1, 1), (28672, 4096, 2, 1), (2048, 2048, 1, 2)):
        tiling = few_tiling(n, k, 16)
        assert (tiling["consumers"], tiling["split"]) == (consumers, split)
        assert split == 1 or -(-n // (64 * consumers)) <= CLUSTERS[split]
    assert few_tiling(2048, 8192, 128)["split"] == 6
    assert few_tiling(256, 512, 16)["split"] == 1               # no block without twelve k tiles


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_one_row_of_4_bit_weights_has_a_kernel_of_its_own(arch):
    """Groups of 32 only; all of K belongs to some warp, and no warp is without work."""
    for n, k, gated in SHAPES:
        if k % 32:
            continue
        glu = "swiglu" if gated else None
        spec = LinearSpec(n, k, FORMATS["q4_1"], "decode", "bfloat16", "bfloat16", max_rows=1, glu=glu)
        family, options = quantized_plan(spec, 1, arch == "sm_90a")
        assert family == "gemm_group_columns" and options["columns"] == 1
        assert options["warps"] <= -(-k // 256) and options["warps"] * options["blocks_per_sm"] <= 32
        assert quantized_plan(replace(spec, weight=FORMATS["q6_k"]), 1, arch == "sm_90a")[0] != "gemm_group_columns"
    assert group_columns_tiling(4096, 14336, 1)["warps"] == 14                # four full rounds
    assert [group_columns_tiling(n, 4096, 1)["ahead"] for n in (4096, 6144, 28672)] == [True, True, False]


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q4_k", "q4_128", "q6_k", "q8_0", "fp8", "fp8_block"])
def test_tiles_of_few_quantised_rows_fit(name):
    """Two stages or more to every group, warps that a multiprocessor holds, and clusters that all run at once."""
    weight = FORMATS[name]
    for (n, k, _), rows in itertools.product(SHAPES, (9, 16, 17, 32, 33, 64)):
        family, tiling = quantized_few_tiling(n, k, rows, weight)
        assert tiling["columns"] >= rows
        if family != "gemm_few_bulk":
            assert family == "gemm_mixed" and n > 64 * 132 and rows > (16 if name == "fp8" else 32)
            continue
        warps, groups, per_sm = tiling["warps"], tiling["groups"], tiling["blocks_per_sm"]
        stages = stages_that_fit(weight, tiling["columns"], warps, tiling["strips"], groups, per_sm)
        feeders = tiling["feeders"]
        assert stages >= (2 * groups if groups > 1 else 2) and (warps * groups + feeders) * per_sm <= 32
        assert 1 <= feeders <= most_feeders(weight) and (feeders == 1) == (per_sm == 2)
        assert rows <= 16 or warps * groups + feeders <= 16, "more warps would spill"
        blocks = -(-n // (16 * warps * tiling["strips"]))
        assert tiling["split"] == 1 or blocks <= CLUSTERS[tiling["split"]] * per_sm
        assert tiling["scaled"] == (rows > (16 if weight.minimum == "stored" else 32))


def test_minimums_of_up_to_16_rows_want_strips_that_share_the_sums_of_x():
    def tile(n: int, k: int, name: str) -> tuple[int, ...]:
        tiling = quantized_few_tiling(n, k, 16, FORMATS[name])[1]
        return tuple(tiling[key] for key in ("warps", "strips", "groups", "split", "feeders"))

    for name in ("q4_1", "q4_k"):
        assert [tile(n, k, name) for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))] == [
            (2, 1, 7, 1, 2), (3, 1, 4, 1, 2), (4, 2, 1, 1, 1), (2, 2, 5, 2, 2)]
    assert [tile(n, 4096, "q5_1")[2] for n in (2048, 4096, 6144)] == [12, 6, 4], "8-bit codes have more registers"
    assert [tile(n, k, "q4_0") for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))] == [
        (2, 1, 7, 1, 3), (1, 3, 11, 1, 3), (4, 2, 2, 1, 1), (4, 1, 3, 2, 3)]


def test_hopper_reads_a_packed_weight_again_for_every_64_rows_up_to_192():
    def plan(rows: int, arch: str, n: int = 4096, name: str = "q4_0") -> tuple[str, int | None]:
        spec = LinearSpec(n, 4096, FORMATS[name], "decode", "bfloat16", "bfloat16", max_rows=rows)
        family, options = rule_plan(spec, arch)
        sources = {stage.name.split("_")[0] for stage in linear(spec, arch).stages}
        assert ("dequantize" in sources) == (family in ("gemm_many", "gemm_few", "gemm_tiles"))
        return family, options.get("columns")

    assert [plan(rows, "sm_90a") for rows in (64, 65, 96, 128, 160, 192)] == [
        ("gemm_few_bulk", columns) for columns in (64, 40, 48, 64, 56, 64)]
    assert [plan(rows, "sm_90a", 28672) for rows in (64, 65, 128, 192)] == [("gemm_mixed", 64)] * 4
    assert plan(193, "sm_90a")[0] in ("gemm_many", "gemm_few")
    assert plan(64, "sm_80")[0] == "gemm_few_quant" and plan(65, "sm_80")[0] == "gemm_tiles"
    assert plan(65, "sm_90a", 4100)[0] == "gemm_tiles"              # rows of y that TMA cannot store


@pytest.mark.parametrize("rows", [16, 64, 96, 128, 160, 192])
def test_tuning_tries_other_tilings_of_what_the_rule_takes(rows):
    for n, name in itertools.product((4096, 28672), ("q4_0", "q4_1", "fp8")):
        space = linear_space(LinearSpec(n, 4096, FORMATS[name], "decode", "bfloat16", "bfloat16", max_rows=rows))
        rule = {key: space.default[key] for key in ("family", "columns")}
        assert len([choice for choice in space.choices if rule.items() <= choice.items()]) > 3


def test_a_long_k_is_cut_in_two_where_the_clusters_fit_in_one_wave():
    def pieces(n: int, rows: int, name: str) -> int:
        return int(quantized_few_tiling(n, 14336, rows, FORMATS[name])[1]["split"])

    assert [pieces(4096, rows, "q4_0") for rows in (16, 32, 64)] == [2, 2, 2]
    assert [pieces(4096, rows, "fp8") for rows in (16, 32, 64)] == [2, 2, 2]
    assert [pieces(n, 16, "q8_0") for n in (1024, 4224, 5120, 8192)] == [1, 2, 1, 1]


def test_groups_leave_warps_for_the_copies_at_32_rows():
    def tile(n: int, rows: int, name: str) -> tuple[int, int, int]:
        tiling = quantized_few_tiling(n, 4096, rows, FORMATS[name])[1]
        return tiling["warps"], tiling["groups"], tiling["feeders"]

    for rows, name in itertools.product((17, 32), ("q4_0", "q4_1", "q8_0", "fp8", "fp8_block")):
        assert (tile(4096, rows, name), tile(6144, rows, name)) == ((2, 7, 2), (3, 4, 2))
    assert (tile(4096, 16, "fp8"), tile(4096, 16, "fp8_block")) == ((2, 11, 2), (2, 7, 3))
    assert tile(4096, 64, "q4_0") == (2, 6, 3)


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


def folds(arch: str = "sm_90a", library: str | None = None, **changes: object) -> tuple[bool, bool]:
    """Whether the matmul before a norm prepares it, and whether the one after it applies it."""
    spec = replace(LinearSpec(1024, 1024, FORMATS["bf16"], "decode", "bfloat16", "bfloat16", max_rows=1),
                   **changes)  # type: ignore[arg-type]
    provider = CudaKernels(TargetSpec("cuda", arch), lambda spec: library)
    return (provider.folds_norm(replace(spec, residual=True, prepares_norm=True)),
            provider.folds_norm(replace(spec, norm_epsilon=1e-5)))


@pytest.mark.parametrize("changes", [{}, {"max_rows": 8}, {"bias": True}, {"weight": FORMATS["q4_1"], "max_rows": 4},
                                     {"weight": FORMATS["fp8"]}, {"arch": "sm_80"}], ids=str)
def test_kernels_for_few_rows_fold_norms(changes):
    assert folds(**changes) == (True, True)


@pytest.mark.parametrize("changes", [
    {"max_rows": 16}, {"max_rows": 16, "weight": FORMATS["q4_0"]}, {"max_rows": None},
    {"phase": "prefill", "max_rows": None},
    {"activation_dtype": "float16", "out_dtype": "float16", "weight": FORMATS["f16"]}, {"library": "cublaslt"}], ids=str)
def test_others_do_not(changes):
    assert folds(**changes) == (False, False)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("weight", ["bf16", "q4_1", "q8_0", "fp8"])
def test_asking_for_a_norm_makes_no_kernel_and_knows_its_family(arch, weight):
    """The plan, which is asked, names the kernel that would be made."""
    for rows in (1, 2, 8, 9, 16, 64, 65, 256):
        spec = LinearSpec(1024, 1024, FORMATS[weight], "decode", "bfloat16", "bfloat16", max_rows=rows)
        provider = CudaKernels(TargetSpec("cuda", arch))
        answer = provider.folds_norm(replace(spec, norm_epsilon=1e-5))
        assert not provider._kernels
        stage = provider.linear(spec).stages[-1].name
        assert stage.startswith(f"{rule_plan(spec, arch)[0]}_") and answer == stage.startswith(NORM_FAMILIES), (rows, stage)


def test_what_a_norm_needs_of_a_matmul():
    assert folds(out_features=1032) == (False, True) and folds(in_features=1032) == (True, False)    # groups of 16
    assert folds(glu="swiglu") == (False, True)             # its result is half as wide
    assert folds(out_dtype="float32") == (False, True)      # the head


def test_a_kernel_with_a_norm_reads_and_writes_what_the_contract_says():
    spec = LinearSpec(1024, 1024, FORMATS["q4_1"], "decode", "bfloat16", "bfloat16", bias=True, max_rows=1)
    provider = CudaKernels(TargetSpec("cuda", "sm_90a"))
    weight = ("weight.codes", "weight.scales", "weight.minimums")
    (before,) = provider.linear(replace(spec, residual=True, prepares_norm=True)).stages
    assert before.inputs == ("x", *weight, "bias", "residual", "norm_weight")
    assert before.outputs == ("y", "scaled", "squares") and before.overwrites == (("residual", "y"),)
    (after,) = provider.linear(replace(spec, norm_epsilon=1e-5)).stages
    assert after.inputs == ("x", *weight, "bias", "squares") and after.outputs == ("y",)
    assert len({before.name, after.name, provider.linear(spec).stages[0].name}) == 3
