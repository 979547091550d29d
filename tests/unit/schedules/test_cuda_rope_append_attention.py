"""RoPE, append and decode attention in one CUDA launch, without a GPU: numbers through the emulator against float64, what it
does to the pages against the kernels one by one, what it touches before the kernel ahead of it is complete, and the rule."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from relaxpack.kernel_spec import AttentionSpec, Kernel
from relaxpack.model_info import FP8
from relaxpack.schedules.kernels.cuda import rope_append
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS
from relaxpack.schedules.kernels.cuda.rope_append_attention import rope_append_attention
from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import FusedTuning, fused_tuning, reserve
from tests.helpers import cuda_harness as harness
from tests.helpers.attention_case import NAN_BITS, Case, from_bits, make_case, reference, relative_error, to_bits
from tests.helpers.cuda_emulator import EmulatedModule

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None or not harness.can_generate(),
    reason="needs g++ on x86-64 (the emulator) and libcudart (TVM's CUDA code generator)")
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4}


def spec(heads: int = 8, kv_heads: int = 2, head_dim: int = 64, page_size: int = 16, dtype: str = "bfloat16",
         window: int | None = None, norm: float | None = None, rotary_dim: int | None = None,
         kv: str | None = None) -> AttentionSpec:
    return AttentionSpec(2, heads, kv_heads, head_dim, rotary_dim or head_dim, page_size, 64, 1024, dtype, kv or dtype,
                         head_dim ** -0.5, window, norm)


@dataclass
class Step:
    """A decode step before it: the pages lack its tokens, `qkv` has them. `case` is what attention then reads."""

    case: Case
    arrays: dict[str, Any]

    @property
    def sizes(self) -> dict[str, int]:
        return {"t": len(self.case.lengths), "p": self.case.num_pages, "layer": self.case.layer}


def make_step(s: AttentionSpec, lengths: list[int], magnitude: float = 1.0, padding: int = 0) -> Step:
    """`padding` rows follow that all point at the scratch page with a length of 1."""
    case, t = make_case(s, lengths, magnitude=magnitude), len(lengths) + padding
    rng, heads, groups, dim, rot = np.random.default_rng(1), s.num_heads, s.num_kv_heads, s.head_dim, s.rotary_dim
    case.lengths = np.array([*lengths, *[1] * padding], np.int32)
    case.page_table = np.concatenate([case.page_table, np.zeros((padding, s.max_pages), np.int32)])
    case.query_start = np.arange(t + 1, dtype=np.int32)
    positions = np.maximum(case.lengths - 1, 0)
    slots = case.page_table[np.arange(t), positions // s.page_size] * s.page_size + positions % s.page_size
    angle = rng.standard_normal((s.max_position, rot // 2)) * 3
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    qkv = to_bits(rng.standard_normal((t, (heads + 2 * groups) * dim)) * magnitude, s.activation_dtype)
    q_norm, k_norm = (1 + 0.3 * rng.standard_normal((2, dim))).astype(np.float32)
    pages = case.pages.copy()
    pages[case.layer, slots // s.page_size, :, :, slots % s.page_size] = NAN_BITS[s.kv_dtype]
    arrays = {"qkv": qkv, "rope_table": table, "positions": positions.astype(np.int32), "slots": slots.astype(np.int32),
              "q_norm": q_norm, "k_norm": k_norm, "pages": pages, "page_table": case.page_table, "lengths": case.lengths}
    # what is written and read, in float64 and rounded once
    x = from_bits(qkv, s.activation_dtype).reshape(t, -1, dim)
    values = x[:, heads + groups:]
    if s.qk_norm_epsilon is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + s.qk_norm_epsilon)
        x = np.concatenate([x[:, :heads] * q_norm, x[:, heads:heads + groups] * k_norm, values], 1)
    cos, sin = (table[positions].astype(np.float64)[:, None, part] for part in (slice(rot // 2), slice(rot // 2, None)))
    a, b = x[..., :rot // 2], x[..., rot // 2:rot]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., rot:]], -1)
    case.q = to_bits(turned[:, :heads].reshape(t, -1), s.activation_dtype)
    new = np.stack([turned[:, heads:heads + groups], values], 1)
    case.pages[case.layer, slots // s.page_size, :, :, slots % s.page_size] = to_bits(new, s.kv_dtype)
    return Step(case, arrays)


def run_fused(s: AttentionSpec, step: Step, tuning: FusedTuning) -> tuple[np.ndarray, np.ndarray]:
    """(y, pages) after the kernel. `qkv` appears when the kernel before it is complete, and not earlier."""
    kernel = rope_append_attention(s, 1, tuning=tuning)
    assert kernel is not None
    pages, t = step.arrays["pages"].copy(), step.sizes["t"]
    y = np.full((t, s.num_heads * s.head_dim), NAN_BITS[s.activation_dtype], np.uint16)
    module = EmulatedModule(harness.generate_source({kernel.stages[0].name: kernel.stages[0].func}, "sm_90a"))
    module.run(kernel.stages[0].name + "_kernel", (t * s.num_kv_heads * tuning.cluster,), tuning.warps * 32,
               cluster=tuning.cluster, late=("qkv",), **{**step.arrays, "pages": pages, "y": y}, **step.sizes)
    return y, pages


def run_rope_append(s: AttentionSpec, step: Step) -> np.ndarray:
    """Pages after rope_append."""
    pages, t = step.arrays["pages"].copy(), step.sizes["t"]
    kernel, lanes = rope_append.rope_append(s), rope_append.lanes_per_head(s.head_dim, s.rotary_dim)
    module = EmulatedModule(harness.generate_source({kernel.stages[0].name: kernel.stages[0].func}, "sm_90a"))
    module.run(kernel.stages[0].name + "_kernel",
               (-(-t * (s.num_heads + 2 * s.num_kv_heads) * lanes // rope_append.THREADS),), rope_append.THREADS,
               **{**step.arrays, "pages": pages, "q": np.empty_like(step.case.q)}, **step.sizes)
    return pages


EDGES = [1, 15, 16, 17, 64, 65, 200, 33]


@pytest.mark.parametrize(("s", "lengths", "tuning", "magnitude"), [
    (spec(), EDGES, FusedTuning(4, 2, 2, 1, 60000), 1.0),
    (spec(8, 2, 128, norm=1e-6), [128, 129, 1, 500], FusedTuning(8, 4, 3), 1.0),
    (spec(8, 2, 128, 64, dtype="float16", norm=1e-6, rotary_dim=32), [63, 64, 65], FusedTuning(2, 2, 2), 1.0),
    (spec(4, 4, 96, window=40), [100, 41, 40, 39, 5, 600], FusedTuning(8, 2, 2), 1.0),          # no group, window
    (spec(16, 1, 64, 64), [100, 9, 130], FusedTuning(4, 1, 2), 1.0),                            # two tiles of heads
    (spec(8, 1, 256, 64, window=100), [63, 65, 500], FusedTuning(8, 2, 2), 8.0),
    (spec(7, 1, 64, 16, norm=1e-5), [31, 200], FusedTuning(16, 1, 2), 30.0),                    # seven heads, 16 blocks
    (spec(2, 2, 64, 16, rotary_dim=16), [70, 3], FusedTuning(1, 2, 2, 2), 1e-3),                # alone, 32 keys a warp
    (spec(6, 2, 80, 16, rotary_dim=80), [90, 16], FusedTuning(8, 2, 4), 1.0),
    (spec(kv=FP8), EDGES, FusedTuning(4, 2, 2, 1, 60000), 1.0),
    (spec(8, 2, 128, 64, "float16", norm=1e-6, rotary_dim=32, kv=FP8), [63, 64, 65], FusedTuning(2, 2, 2, 2), 1.0),
    (spec(4, 4, 96, window=40, kv=FP8), [100, 41, 40, 39, 5, 600], FusedTuning(8, 2, 2), 1.0),
    (spec(16, 1, 64, 16, norm=1e-5, kv=FP8), [31, 200], FusedTuning(16, 1, 2), 30.0),
])
def test_equals_float64_and_appends_what_rope_append_does(s: AttentionSpec, lengths: list[int], tuning: FusedTuning,
                                                          magnitude: float) -> None:
    step = make_step(s, lengths, magnitude)
    y, pages = run_fused(s, step, tuning)
    assert relative_error(from_bits(y, s.activation_dtype), reference(step.case)) < TOLERANCE[s.activation_dtype]
    np.testing.assert_array_equal(pages, run_rope_append(s, step))


def test_padding_and_empty_rows() -> None:
    """Padded rows write the scratch page alone and see their own token; a row of length 0 gives zeros and appends."""
    s, tuning = spec(), FusedTuning(4, 2, 2)
    step = make_step(s, [40, 7, 0], padding=3)
    y, pages = run_fused(s, step, tuning)
    got, want = from_bits(y, s.activation_dtype), from_bits(step.arrays["qkv"], s.activation_dtype)
    values = want.reshape(6, -1, s.head_dim)[3:, s.num_heads + s.num_kv_heads:]
    np.testing.assert_array_equal(got[3:].reshape(3, s.num_kv_heads, -1, s.head_dim),
                                  np.repeat(values[:, :, None], s.num_heads // s.num_kv_heads, 2))
    assert (got[2] == 0).all()
    assert relative_error(got[:2], reference(step.case)[:2]) < TOLERANCE[s.kv_dtype]
    changed = np.argwhere((pages != step.arrays["pages"]).any(axis=(2, 3, 5)))             # layer, page, place in it
    used = {(int(slot) // 16, int(slot) % 16) for slot in step.arrays["slots"]}
    assert {(int(page), int(place)) for _, page, place in changed} == used and set(changed[:, 0]) == {step.case.layer}


def test_a_row_is_the_same_bits_alone_and_in_a_crowd() -> None:
    """A cluster knows nothing of the rows beside it; repeats are equal too."""
    s, tuning = spec(8, 2, 128, norm=1e-6), FusedTuning(4, 2, 2)
    step = make_step(s, [100, 260, 33])
    y, pages = run_fused(s, step, tuning)
    alone = {name: step.arrays[name][1:2] for name in ("qkv", "positions", "slots", "page_table", "lengths")}
    case = replace(step.case, lengths=step.case.lengths[1:2], q=step.case.q[1:2])
    one, _ = run_fused(s, Step(case, {**step.arrays, **alone}), tuning)
    np.testing.assert_array_equal(one[0], y[1])
    again, pages_again = run_fused(s, step, tuning)
    np.testing.assert_array_equal(again, y)
    np.testing.assert_array_equal(pages_again, pages)


def test_numbers_that_are_not_finite_stay_visible() -> None:
    """A NaN among the new values reaches the output of its heads: the engine refuses such rows by it."""
    s = spec()
    step = make_step(s, [40, 7])
    step.arrays["qkv"][0, (s.num_heads + s.num_kv_heads) * s.head_dim] = NAN_BITS[s.activation_dtype]
    y, _ = run_fused(s, step, FusedTuning(4, 2, 2))
    got = from_bits(y, s.activation_dtype).reshape(2, s.num_kv_heads, -1, s.head_dim)
    assert np.isnan(got[0, 0, :, 0]).all() and np.isfinite(got[1]).all()


KERNELS: dict[str, tuple[AttentionSpec, FusedTuning]] = {
    "8b_fp8": (spec(32, 8, 128, kv=FP8), FusedTuning(2, 4, 3, 2)),
    "1b_fp8": (spec(32, 8, 64, kv=FP8), FusedTuning(8, 4, 3, 2)),
    "8b": (spec(32, 8, 128), FusedTuning(8, 4, 2)), "1b": (spec(32, 8, 64), FusedTuning(8, 4, 3)),
    "norm": (spec(32, 8, 128, norm=1e-6), FusedTuning(4, 4, 2)), "7b": (spec(28, 4, 128), FusedTuning(16, 4, 2)),
    "d256": (spec(8, 4, 256, 64, window=512), FusedTuning(8, 4, 2)), "g16": (spec(16, 1, 128), FusedTuning(8, 4, 2))}


@pytest.mark.slow
@pytest.mark.skipif(not harness.have_compiler(), reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120"])
def test_compiles_without_local_memory(arch: str) -> None:
    made = {name: rope_append_attention(s, 1, arch, tuning) for name, (s, tuning) in KERNELS.items()}
    funcs = {f"fused_{name}": kernel.stages[0].func for name, kernel in made.items() if kernel is not None}
    found = harness.resources(harness.generate_source(funcs, arch), arch)
    assert len(found) == len(KERNELS)
    for kernel in found:
        assert kernel.stack == kernel.spill_stores == kernel.spill_loads == 0, kernel


def test_pages_may_have_more_elements_than_32_bits_count() -> None:
    func = _stages(*KERNELS["8b"])[0].func
    (pages,) = [parameter for parameter in func.params if parameter.name == "pages"]
    assert str(pages.ty.shape[0].ty.dtype) == "int64"


def test_what_no_such_kernel_serves() -> None:
    """Architectures without clusters, pages too small for whole copies, halves that are no multiple of 8."""
    s = spec(32, 8, 128)
    assert rope_append_attention(s, 1, "sm_90a") is not None
    for arch in ("sm_80", "sm_86", "sm_89"):
        assert rope_append_attention(s, 1, arch) is None
    for other in (spec(32, 8, 128, page_size=1), spec(32, 8, 80, rotary_dim=24), spec(32, 8, dtype="float32"),
                  spec(7, 2, 128), spec(32, 8, 64, rotary_dim=48, kv=FP8), spec(32, 8, kv="float16")):
        assert rope_append_attention(other, 1, "sm_90a") is None


@pytest.mark.parametrize("arch", [arch for arch in sorted(LIMITS) if arch not in ("sm_80", "sm_86", "sm_89")])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_choices_fit_shared_memory_and_end_with_the_batch(arch: str, head_dim: int) -> None:
    s, limit = spec(32, 8, head_dim), LIMITS[arch][0] * 1024
    chosen = {rows: fused_tuning(s, rows, arch) for rows in (1, 2, 4, 8, 16, 32, 64, 256)}
    assert all(tuning is None or tuning.shared_bytes(s) <= limit for tuning in chosen.values())
    assert chosen[256] is None
    missing = [rows for rows, tuning in chosen.items() if tuning is None]
    assert missing == [rows for rows in chosen if rows >= min(missing)]      # never one by one below a fused batch
    for tuning in chosen.values():      # a reserve without effect would give one kernel two names
        assert tuning is None or not tuning.reserve or tuning.shared_bytes(s) > replace(tuning, reserve=0).shared_bytes(s)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_reserve_leaves_room_for_so_many_blocks(blocks: int) -> None:
    """A multiprocessor keeps 1 kB of its 228 for each block."""
    tuning = replace(FusedTuning(8, 4, 2), reserve=reserve("sm_90a", blocks))
    size = tuning.shared_bytes(spec(32, 8, 64)) + 1024
    assert blocks * size <= 228 * 1024 < (blocks + 1) * size and size > FusedTuning(8, 4, 2).shared_bytes(spec(32, 8, 64))


def test_names_differ_where_kernels_do() -> None:
    names = {stage.name for s, tuning in KERNELS.values() for more in ((), (replace(s, window=9),))
             for stage in _stages(more[0] if more else s, tuning)}
    assert len(names) == 2 * len(KERNELS)


def _stages(s: AttentionSpec, tuning: FusedTuning) -> Any:
    kernel: Kernel | None = rope_append_attention(s, 1, tuning=tuning)
    assert kernel is not None
    return kernel.stages
