"""Decode attention whose rows share leading keys, without a GPU: numbers through the emulator against float64, which pages
it reads, and that rows which share nothing get the very bits they get without it."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.fused_attention import RAGGED
from relaxpack.kernel_spec import SHARED_KEYS, AttentionSpec
from relaxpack.model_info import FP8
from relaxpack.runtime.spread import Chooser
from relaxpack.runtime.step_plan import SequenceStep
from relaxpack.schedules.kernels.cuda.attention_decode import decode_attention, spread_attention
from relaxpack.schedules.kernels.cuda.attention_decode_merge import MERGE_WARPS
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS, DecodeTuning, shared_bytes, spread_tuning
from relaxpack.schedules.kernels.cuda.attention_prefix import PrefixTuning, prefix_tuning, shares_prefix
from relaxpack.schedules.kernels.cuda.attention_prefix_hopper import HopperPrefixTuning, hopper_prefix_tuning, merge_threads
from relaxpack.schedules.kernels.cuda.spread_costs import spread_costs
from tests.helpers import cuda_harness as harness
from tests.helpers.attention_case import NAN_BITS, Case, from_bits, make_case, reference, relative_error
from tests.unit.schedules.test_cuda_attention import TOLERANCE, emulate, inputs, spec

RESULTS = [Path(__file__).parents[3] / f"benchmarks/results/2026-11-30-h200-decode-attention-{run}.json" for run in (2, 3)]
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None or not harness.can_generate(),
    reason="needs g++ on x86-64 (the emulator) and libcudart (TVM's CUDA code generator)")


def sharing_case(s: AttentionSpec, lengths: list[int], shared: list[int], magnitude: float = 1.0) -> Case:
    case = make_case(s, lengths, magnitude=magnitude)
    first, *others = [row for row, keys in enumerate(shared) if keys]
    for row in others:
        pages = shared[row] // s.page_size
        case.page_table[row, :pages] = case.page_table[first, :pages]
    return case


def run_shared(s: AttentionSpec, case: Case, shared: list[int], tuning: DecodeTuning,
               prefix: PrefixTuning | HopperPrefixTuning) -> np.ndarray:
    """Bits of y. Queries and the prefix kernel's results appear when the kernels that make them are complete."""
    rows = len(case.lengths)
    y = np.full_like(case.q, NAN_BITS[s.activation_dtype])
    kernel = spread_attention(s, rows, tuning=tuning, prefix=prefix)
    assert kernel is not None
    if isinstance(prefix, HopperPrefixTuning):
        grids = [(prefix.tiles(s, rows) * s.num_kv_heads * prefix.splits,), (s.num_kv_heads, rows)]
        threads, clusters = [prefix.roles.threads(s), merge_threads(s)], [1, 1]
    else:
        grids = [(prefix.clusters(s, rows) * prefix.cluster,)]
        threads, clusters = [prefix.threads], [prefix.cluster]
    merges = min(tuning.blocks, rows * s.num_kv_heads) if tuning.compact else tuning.blocks
    emulate(kernel, [*grids, (tuning.blocks,), (s.num_heads // s.num_kv_heads, merges)],
            [*threads, tuning.warps * 32, MERGE_WARPS * 32],
            {**inputs(case), "y": y, "shared": np.array(shared, np.int32)},
            {"t": rows, "p": case.num_pages, "layer": case.layer}, [*clusters, 1, 1],
            late=("q", "parts", "part_stats", "prefix", "prefix_stats", "partial", "stats", "cuts"))
    return y


@pytest.mark.parametrize(("s", "lengths", "shared", "tuning", "prefix", "magnitude"), [
    (spec(), [200, 0, 33, 150, 129, 400, 300], [128, 0, 0, 128, 128, 128, 0], DecodeTuning(4, 3, 7),
     PrefixTuning(4, 2, 2, 1, 16, 2), 1.0),                                                 # some share, blocks cut anywhere
    (spec(8, 2, 128), [300, 270, 257], [256] * 3, DecodeTuning(4, 2, 3), PrefixTuning(8, 4, 3, 1, 16), 30.0),
    (spec(6, 2, 96), [300, 10, 257, 280], [256, 0, 256, 256], DecodeTuning(4, 2, 5), PrefixTuning(8, 4, 3, 1, 16), 1.0),
    (spec(7, 1, 64, 64, "float16"), [300] * 5, [256] * 5, DecodeTuning(4, 3, 7, 2), PrefixTuning(16, 4, 2, 2, 16, 2), 1.0),
    (spec(4, 4, 256), [140, 129, 131], [128] * 3, DecodeTuning(4, 2, 4), PrefixTuning(4, 4, 2, 1, 8, 1), 1e-3),    # no group
    (spec(8, 2, 128, 64), [300, 257, 270], [256] * 3, DecodeTuning(4, 2, 3), PrefixTuning(4, 8, 2, 2, 16), 1.0),
    (spec(16, 1), [140] * 9, [128] * 9, DecodeTuning(4, 2, 4), PrefixTuning(2, 2, 2, 1, 16, 2), 1.0),    # many query tiles
    (spec(8, 2, 128), [290, 600, 257, 0], [256, 256, 256, 0], DecodeTuning(4, 2, 40, compact=True),
     PrefixTuning(8, 8, 2, 2, 16), 1.0),                                                    # as the rule of few rows
    (spec(8, 2, 128), [700, 0, 33, 650, 657], [512, 0, 0, 512, 512], DecodeTuning(4, 2, 3), HopperPrefixTuning(3), 1.0),
    (spec(7, 1, 64, 64, "float16"), [300] * 20, [256] * 20, DecodeTuning(4, 3, 7, 2), HopperPrefixTuning(2), 30.0),
    (spec(2, 2, 256, 8), [280, 257], [256] * 2, DecodeTuning(4, 2, 4), HopperPrefixTuning(8, 64, 1), 1e-3),  # some without
    (spec(32, 2, 64), [270] * 9, [256] * 9, DecodeTuning(4, 3, 5, 2), HopperPrefixTuning(4), 1.0),
])
def test_equals_float64(s: AttentionSpec, lengths: list[int], shared: list[int], tuning: DecodeTuning,
                        prefix: PrefixTuning | HopperPrefixTuning, magnitude: float) -> None:
    case = sharing_case(s, lengths, shared, magnitude)
    y = from_bits(run_shared(s, case, shared, tuning, prefix), s.activation_dtype)
    assert relative_error(y, reference(case)) < TOLERANCE[s.activation_dtype]


TUNING, PREFIX = DecodeTuning(4, 3, 5), PrefixTuning(4, 2, 2, 1, 16, 2)


def test_the_shared_keys_of_one_row_serve_all() -> None:
    """The other rows' page tables may say anything there; repeats are equal bit for bit."""
    shared = [0, 128, 128, 128]
    case = sharing_case(spec(), [150, 129, 200, 170], shared)
    y = run_shared(spec(), case, shared, TUNING, PREFIX)
    case.page_table[2:, :128 // 16] = 0                                                    # the scratch page is NaN
    np.testing.assert_array_equal(run_shared(spec(), case, shared, TUNING, PREFIX), y)


def test_nothing_shared_gives_the_bits_of_attention_without_it() -> None:
    s = spec()
    case, lengths = make_case(s, [150, 1, 0, 200]), 4
    plain = np.full_like(case.q, NAN_BITS[s.activation_dtype])
    emulate(decode_attention(s, tuning=TUNING), [(TUNING.blocks,), (s.num_heads // s.num_kv_heads, TUNING.blocks)],
            [TUNING.warps * 32, MERGE_WARPS * 32], {**inputs(case), "y": plain},
            {"t": lengths, "p": case.num_pages, "layer": case.layer}, late=("q", "partial", "stats", "cuts"))
    np.testing.assert_array_equal(run_shared(s, case, [0] * lengths, TUNING, PREFIX), plain)


def test_what_no_such_kernel_serves() -> None:
    s = spec(32, 8, 128)
    assert shares_prefix(s, "sm_90a")
    for arch in ("sm_80", "sm_86", "sm_89"):
        assert not shares_prefix(s, arch)
    for other in (replace(s, window=100), spec(32, 8, kv=FP8), spec(32, 8, dtype="float32"),
                  spec(32, 8, 128, page_size=1), spec(7, 2, 128)):
        assert not shares_prefix(other, "sm_90a")


@pytest.mark.parametrize("arch", [arch for arch in sorted(LIMITS) if arch not in ("sm_80", "sm_86", "sm_89")])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_choices_fit_shared_memory_and_tiles_divide_what_is_shared(arch: str, head_dim: int) -> None:
    s = spec(32, 8, head_dim)
    for rows in (1, 8, 16, 32, 128):
        assert prefix_tuning(s, rows, arch).shared_bytes(s) <= LIMITS[arch][0] * 1024
        assert SHARED_KEYS % prefix_tuning(s, rows, arch).keys == 0
        tuning = spread_tuning(s, rows, arch)
        assert SHARED_KEYS % tuning.keys == 0 and shared_bytes(s, tuning) <= LIMITS[arch][0] * 1024


def test_wgmma_reads_shared_keys_where_it_was_measured() -> None:
    for head_dim in (64, 128):
        s = spec(32, 8, head_dim)
        for rows in (4, 8, 32, 128):
            tuning = hopper_prefix_tuning(s, rows, "sm_90a")
            assert tuning is not None and SHARED_KEYS % tuning.keys == 0
            assert tuning.tiles(s, rows) * s.num_kv_heads * tuning.splits <= 132
        stages = {(rows, arch): len(spread_attention(s, rows, arch).stages)      # type: ignore[union-attr]
                  for rows in (1, 2, 4, 64) for arch in ("sm_90a", "sm_90")}
        assert stages == {(1, "sm_90a"): 2, (2, "sm_90a"): 3, (4, "sm_90a"): 4, (64, "sm_90a"): 4,
                          (1, "sm_90"): 2, (2, "sm_90"): 3, (4, "sm_90"): 3, (64, "sm_90"): 3}
    for other in (spec(32, 8, 96), spec(32, 8, 256), spec(32, 8, 128, 4), spec(32, 8, window=100), spec(32, 8, kv=FP8)):
        assert hopper_prefix_tuning(other, 32, "sm_90a") is None


def test_four_rows_by_the_rule() -> None:
    """As built for an 8B: more blocks share the keys than there are tiles, most rows of the tile of queries are empty."""
    s, lengths, shared = spec(32, 8, 128), [530, 70, 513, 600], [512, 0, 512, 512]
    prefix = hopper_prefix_tuning(s, 4, "sm_90a")
    assert prefix == HopperPrefixTuning(16)
    case = sharing_case(s, lengths, shared)
    y = from_bits(run_shared(s, case, shared, spread_tuning(s, 4, "sm_90a"), prefix), s.activation_dtype)
    assert relative_error(y, reference(case)) < TOLERANCE[s.activation_dtype]


def test_the_merge_has_few_blocks_where_that_was_measured_to_gain() -> None:
    compact = {(head_dim, rows): spread_tuning(spec(32, 8, head_dim), rows, "sm_90a").compact
               for head_dim in (64, 128, 256) for rows in (1, 4, 8, 32)}
    assert {key for key, value in compact.items() if value} == {(128, 1), (128, 4)}
    assert not spread_tuning(spec(32, 32, 128), 1, "sm_90a").compact                        # no group: few blocks anyway


def test_wgmma_leaves_rows_that_share_nothing_alone() -> None:
    """Nothing shared: the bits of attention without it. Some share: repeats, whatever the others' page tables say there."""
    s, prefix = spec(), HopperPrefixTuning(2)
    case = make_case(s, [150, 1, 0, 200])
    np.testing.assert_array_equal(run_shared(s, case, [0] * 4, TUNING, prefix), run_shared(s, case, [0] * 4, TUNING, PREFIX))
    shared = [0, 256, 256, 256]
    case = sharing_case(s, [150, 270, 300, 257], shared)
    y = run_shared(s, case, shared, TUNING, prefix)
    case.page_table[2:, :256 // 16] = 0                                                    # the scratch page is NaN
    np.testing.assert_array_equal(run_shared(s, case, shared, TUNING, prefix), y)


def test_the_costs_choose_what_was_measured_to_be_faster() -> None:
    """Of the two graphs of a bucket, by the H200's times between matmuls and for shared keys, those of the last run."""
    cases: dict[tuple[Any, ...], dict[str, float]] = {}
    for results in RESULTS:
        measured: dict[tuple[Any, ...], dict[str, float]] = {}
        for row in json.loads(results.read_text())["rows"]:
            if row["kind"] in ("time", "shared"):
                key = row["model"], row["batch"], row.get("length"), row.get("shared", 0), row.get("own")
                label = row["kernel"].replace(f".{row['model']}.{row['batch']}", "")
                measured.setdefault(key, {})[label] = row.get("us") or row["over_matmuls_us"]
        cases |= measured
    wrong = []
    for (model, rows, length, shared, own), times in cases.items():
        s = spec(32, 8, {"8b": 128, "1b": 64}[model])
        lengths = RAGGED[rows] if length == "ragged" else [length or shared + own] * rows
        compact = "spread@c" if spread_tuning(s, rows, "sm_90a").compact else "spread"
        second = times["spread@h" if "spread@h" in times else compact]       # the rule of today, a variant of the run's
        first, common, most = times.get("fused", times.get("none", 0.0)), shared // 16, -(-max(lengths) // 16)
        steps = [SequenceStep([1], keys - 1, [*range(common), *range(most * (i + 1), most * (i + 2))], [0])
                 for i, keys in enumerate(lengths)]
        takes_second = Chooser(16).choose(steps, spread_costs(s, rows, "sm_90a")) is not None
        if takes_second != (second < first):
            wrong.append((model, rows, length, shared, own))
    assert len(cases) == 42 and not wrong


@pytest.mark.slow
@pytest.mark.skipif(not harness.have_compiler(), reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120"])
def test_compiles_without_local_memory(arch: str) -> None:
    kernels = {name: spread_attention(s, rows, arch) for name, s, rows in (
        ("8b", spec(32, 8, 128), 8), ("8b_32", spec(32, 8, 128), 32), ("1b", spec(32, 8, 64), 128),
        ("d256", spec(8, 4, 256, 64), 16), ("d96", spec(8, 4, 96), 32), ("8b_1", spec(32, 8, 128), 1))}
    funcs = {f"spread_{name}_{i}": stage.func for name, kernel in kernels.items() if kernel is not None
             for i, stage in enumerate(kernel.stages)}
    found = harness.resources(harness.generate_source(funcs, arch), arch)
    assert len(found) == len(funcs) == 3 * len(kernels) - 1 + 3 * (arch == "sm_90a")        # those by wgmma are two
    for kernel in found:
        assert kernel.stack == kernel.spill_stores == kernel.spill_loads == 0, kernel


def test_names_differ_where_kernels_do() -> None:
    """A bundle has one function of a name: those of one row, of few, of more, and those that share nothing are others."""
    s = spec(32, 8)
    kernels = [decode_attention(s), *(spread_attention(s, rows) for rows in (1, 8, 16, 32, 128))]
    made: dict[str, str] = {}
    for stage in (stage for kernel in kernels if kernel is not None for stage in kernel.stages):
        assert made.setdefault(stage.name, stage.func.script()) == stage.func.script(), stage.name
    assert len(made) >= 2 + 2 + 3 + 3
