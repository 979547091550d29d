"""CUDA attention kernels without a GPU: contracts and errors, compilation for every architecture, resource use, and
numbers through the emulator of generated CUDA (tests/helpers/cuda_emulator.py)."""

from __future__ import annotations

import platform
import shutil
from typing import Any

import numpy as np
import pytest

from relaxpack.errors import CompileError
from relaxpack.kernel_spec import TOP_LOGPROBS, AttentionSpec, Kernel, SamplingSpec
from relaxpack.model_info import FP8
from relaxpack.schedules.kernels.cuda import (
    attention_prefill,
    attention_prefill_hopper_tuning,
    rope_append,
    sampling_pick,
    sampling_scan,
)
from relaxpack.schedules.kernels.cuda import top_logprobs as top_logprobs_kernel
from relaxpack.schedules.kernels.cuda.attention_decode import decode_attention
from relaxpack.schedules.kernels.cuda.attention_decode_merge import MERGE_WARPS
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS, DecodeTuning, default_tuning, shared_bytes
from relaxpack.schedules.kernels.cuda.attention_prefill import PrefillTuning, prefill_attention
from relaxpack.schedules.kernels.cuda.attention_prefill_hopper_tuning import HopperTuning
from relaxpack.schedules.kernels.cuda.sampling import sample
from tests.helpers import cuda_harness as harness
from tests.helpers import sampling_case
from tests.helpers.attention_case import (
    NAN_BITS,
    Case,
    from_bits,
    make_case,
    reference,
    relative_error,
    to_bits,
)
from tests.helpers.cuda_emulator import EmulatedModule

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None or not harness.can_generate(),
    reason="needs g++ on x86-64 (the emulator) and libcudart (TVM's CUDA code generator)")
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4}


def spec(heads: int = 8, kv_heads: int = 2, head_dim: int = 64, page_size: int = 16, dtype: str = "bfloat16",
         window: int | None = None, norm: float | None = None, rotary_dim: int | None = None,
         kv: str | None = None) -> AttentionSpec:
    return AttentionSpec(2, heads, kv_heads, head_dim, rotary_dim or head_dim, page_size, 64, 64, dtype, kv or dtype,
                         head_dim ** -0.5, window, norm)


def emulate(kernel: Kernel, grids: list[tuple[int, ...]], threads: list[int], buffers: dict[str, Any],
            sizes: dict[str, int], clusters: list[int] | None = None, late: tuple[str, ...] = ()) -> None:
    """Run all stages of a kernel; temporaries start as NaN (floats) or -7. `late`: what the kernel ahead of each stage
    may not have written yet when that begins."""
    module = EmulatedModule(harness.generate_source({s.name: s.func for s in kernel.stages}, "sm_90a"))
    held = dict(buffers)
    for name, (shape, dtype) in kernel.temporaries.items():
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in shape)
        held[name] = (np.full(shape, NAN_BITS[dtype], np.uint16) if dtype in NAN_BITS
                      else np.full(shape, np.nan if dtype == "float32" else -7, dtype))
    for i, (stage, grid, count) in enumerate(zip(kernel.stages, grids, threads, strict=True)):
        maps = harness.tensor_maps(stage.func, {**held, **sizes})
        module.run(stage.name + "_kernel", grid, count, cluster=clusters[i] if clusters else 1,
                   late=tuple(name for name in late if name in stage.inputs), **held, **sizes, **maps)


def decode_error(s: AttentionSpec, lengths: list[int], tuning: DecodeTuning, magnitude: float = 1.0) -> float:
    case = make_case(s, lengths, magnitude=magnitude)
    y = np.full_like(case.q, NAN_BITS[s.activation_dtype])
    merges = min(tuning.blocks, len(lengths) * s.num_kv_heads) if tuning.compact else tuning.blocks
    emulate(decode_attention(s, tuning=tuning), [(tuning.blocks,), (s.num_heads // s.num_kv_heads, merges)],
            [tuning.warps * 32, MERGE_WARPS * 32], {**inputs(case), "y": y},
            {"t": len(lengths), "p": case.num_pages, "layer": case.layer})
    return relative_error(from_bits(y, s.activation_dtype), reference(case))


def prefill_error(s: AttentionSpec, queries: list[int], cached: list[int], tuning: Any, magnitude: float = 1.0) -> float:
    tuning = tuning or attention_prefill_hopper_tuning.default_tuning(s)
    case = make_case(s, [a + b for a, b in zip(queries, cached, strict=True)], queries, magnitude=magnitude)
    y = np.full_like(case.q, NAN_BITS[s.activation_dtype])
    t = sum(queries)
    if isinstance(tuning, HopperTuning):
        grid, threads = (tuning.grid(s, t, len(queries)),), tuning.threads(s)
    else:
        grid, threads = (s.num_heads, -(-t // tuning.rows) + len(queries)), tuning.warps * 32
    emulate(prefill_attention(s, tuning=tuning), [grid], [threads],
            {**inputs(case), "y": y}, {"t": t, "b": len(queries), "p": case.num_pages, "layer": case.layer})
    return relative_error(from_bits(y, s.activation_dtype), reference(case))


def inputs(case: Case) -> dict[str, Any]:
    return {"q": case.q, "pages": case.pages, "page_table": case.page_table, "query_start": case.query_start,
            "lengths": case.lengths}


@pytest.mark.parametrize(("s", "lengths", "tuning", "magnitude"), [
    (spec(), [1, 15, 16, 17, 64, 65, 200, 0, 33], DecodeTuning(4, 3, 7), 1.0),               # blocks cut rows anywhere
    (spec(head_dim=128, dtype="float16"), [300, 15], DecodeTuning(4, 2, 3), 1.0),
    (spec(4, 4, 96, window=40), [100, 41, 40, 39, 5, 600], DecodeTuning(4, 3, 16), 1.0),     # no group, window
    (spec(16, 1, 64, 8), [100, 9, 8, 7, 130], DecodeTuning(2, 4, 5), 1.0),                   # two tiles of heads
    (spec(8, 1, 256, 64, window=100), [63, 64, 65, 128, 500], DecodeTuning(4, 2, 4), 8.0),
    (spec(12, 4, 64), [30] * 45, DecodeTuning(4, 3, 11), 1.0),                               # whole rows per block
    (spec(2, 1, 64, 1), [1, 2, 60], DecodeTuning(4, 2, 5), 1.0),                             # one token a page
    # stage two of as many blocks as there may be cuts: fewer and more than stage one has, more than 32, with idle blocks
    (spec(), [1, 15, 16, 17, 64, 65, 200, 0, 33], DecodeTuning(4, 3, 7, compact=True), 1.0),
    (spec(), [900, 0, 40], DecodeTuning(2, 2, 75, compact=True), 1.0),
    (spec(2, 2, 96, window=40), [600, 3], DecodeTuning(4, 3, 40, compact=True), 1.0),
    (spec(kv=FP8), [1, 15, 16, 17, 64, 65, 200, 0, 33], DecodeTuning(4, 3, 7, 2), 1.0),
    (spec(head_dim=128, dtype="float16", kv=FP8), [300, 15], DecodeTuning(4, 2, 3), 30.0),
    (spec(4, 4, 96, window=40, kv=FP8), [100, 41, 40, 39, 5, 600], DecodeTuning(4, 3, 16), 1.0),
    (spec(16, 1, 128, 64, kv=FP8), [100, 9, 8, 7, 130], DecodeTuning(2, 2, 5, 2), 1e-2),     # most are subnormal
    (spec(8, 1, 256, 64, window=100, kv=FP8), [63, 64, 65, 128, 500], DecodeTuning(4, 2, 4), 8.0),
])
def test_decode_attention_equals_float64(s: AttentionSpec, lengths: list[int], tuning: DecodeTuning,
                                         magnitude: float) -> None:
    assert decode_error(s, lengths, tuning, magnitude) < TOLERANCE[s.activation_dtype]


@pytest.mark.parametrize(("s", "queries", "cached", "tuning", "magnitude"), [
    (spec(2, 1, 128), [1, 17, 130], [0, 5, 70], PrefillTuning(4, 2, 32), 1.0),
    (spec(2, 2, 64, 64, "float16"), [1, 0, 64, 128, 129], [100, 0, 0, 1, 63], PrefillTuning(4, 2, 64), 1.0),
    (spec(2, 1, 96, window=50), [100, 20], [90, 80], PrefillTuning(4, 1, 32), 1.0),
    (spec(1, 1, 256, 8), [3, 70], [0, 0], PrefillTuning(8, 1, 64), 5.0),
    (spec(1, 1, 64), [2] * 40, [3] * 40, PrefillTuning(4, 1, 16), 1.0),                      # more than 32 sequences
    (spec(2, 1, 128, kv=FP8), [1, 17, 130], [0, 5, 70], PrefillTuning(4, 2, 32), 1.0),
    (spec(2, 1, 96, window=50, dtype="float16", kv=FP8), [100, 20], [90, 80], PrefillTuning(4, 1, 32), 30.0),
    (spec(2, 2, 64, 64, kv=FP8), [1, 0, 64, 129], [100, 0, 1, 63], PrefillTuning(4, 2, 64), 1e-2),
    (spec(8, 2, 128), [1, 17, 130], [0, 5, 370], HopperTuning(blocks=3), 1.0),                # tours of several tiles
    (spec(7, 1, 64, window=50), [100, 0, 20] + [2] * 40, [390, 0, 80] + [3] * 40,
     HopperTuning(consumers=3, blocks=5), 1.0),                                              # 27 tokens of 7 heads a tile
    (spec(1, 1, 256, 8, "float16"), [3, 70], [0, 200], HopperTuning(keys=64, query_stages=1), 5.0),
    (spec(2, 1, 64, 256), [150, 300], [173, 0], HopperTuning(keys=64, packed=False, blocks=0, ping_pong=False), 1.0),
    # e4m3 pages, converted in shared memory: every head_dim (rows of 64, 128 and 256 bytes), both dtypes. None: the rule's
    (spec(8, 2, 128, kv=FP8), [1, 17, 130], [0, 5, 370], HopperTuning(blocks=3), 1.0),
    (spec(7, 1, 64, window=50, kv=FP8), [100, 0, 20] + [2] * 40, [390, 0, 80] + [3] * 40,
     HopperTuning(blocks=5, raw_stages=3), 1.0),
    (spec(1, 1, 256, 8, "float16", kv=FP8), [3, 70], [0, 200], HopperTuning(keys=64, query_stages=1), 5.0),
    (spec(2, 1, 64, 256, kv=FP8), [150, 300], [173, 0],
     HopperTuning(keys=64, packed=False, blocks=0, ping_pong=False, raw_stages=1), 1e-2),      # most are subnormal
    (spec(4, 1, 64, dtype="float16", kv=FP8), [200, 33], [31, 150],
     HopperTuning(consumers=3, keys=96, query_stages=1, raw_stages=4, blocks=2), 1e-2),
    (spec(16, 2, kv=FP8), [1, 95, 0, 97, 130], [0, 1, 16, 95, 300], None, 1.0),             # 3 consumers, tiles of 96 keys
    (spec(8, 2, page_size=64, kv=FP8), [1, 63, 64, 200], [127, 1, 0, 65], None, 30.0),        # pages of 64: 2 consumers
    (spec(8, 2, dtype="float16", kv=FP8), [70, 0, 9], [100, 0, 30], HopperTuning(raw_stages=4), 1.0),
    (spec(8, 2, 128, window=100, kv=FP8), [129, 1, 40], [300, 127, 0], None, 1.0),
    (spec(2, 2, 256, 64, window=70, kv=FP8), [65, 1], [0, 190], None, 1.0),
])
def test_prefill_attention_equals_float64(s: AttentionSpec, queries: list[int], cached: list[int], tuning: Any,
                                          magnitude: float) -> None:
    assert prefill_error(s, queries, cached, tuning, magnitude) < TOLERANCE[s.activation_dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conversion_for_wgmma_is_exact(dtype: str) -> None:
    """One query over one key has the value itself as its output: every code, and the finite number that stands for NaN."""
    s = spec(2, 2, 128, dtype=dtype, kv=FP8)
    case = make_case(s, [1])
    codes = np.arange(256, dtype=np.uint8)
    case.pages[case.layer, case.page_table[0, 0], 1, :, 0] = codes.reshape(2, 128)
    y = np.full_like(case.q, NAN_BITS[dtype])
    tuning = HopperTuning()
    emulate(prefill_attention(s, tuning=tuning), [(tuning.grid(s, 1, 1),)], [tuning.threads(s)], {**inputs(case), "y": y},
            {"t": 1, "b": 1, "p": case.num_pages, "layer": case.layer})
    number = codes % 128 != 0x7F
    np.testing.assert_array_equal(from_bits(y, dtype).reshape(-1)[number], from_bits(codes[number], FP8))
    np.testing.assert_array_equal(from_bits(y, dtype).reshape(-1)[~number], [480, -480])


@pytest.mark.parametrize("s", [spec(norm=1e-6, head_dim=128), spec(6, 3, 96, 8, "float16"), spec(4, 1, rotary_dim=32),
                               spec(4, 1, 80, rotary_dim=20), spec(kv=FP8), spec(4, 1, 96, 8, kv=FP8, rotary_dim=32),
                               spec(4, 1, 80, dtype="float16", kv=FP8, norm=1e-6, rotary_dim=20)])
def test_rope_append_rotates_and_touches_only_its_slots(s: AttentionSpec) -> None:
    t, rng, dim, rot, heads, groups = 19, np.random.default_rng(0), s.head_dim, s.rotary_dim, s.num_heads, s.num_kv_heads
    nan = NAN_BITS[s.kv_dtype]
    qkv = to_bits(rng.standard_normal((t, (heads + 2 * groups) * dim)), s.activation_dtype)
    angle = rng.standard_normal((s.max_position, rot // 2)) * 3
    table = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
    positions = rng.integers(0, s.max_position, t).astype(np.int32)
    slots = rng.permutation(8 * s.page_size)[:t].astype(np.int32)
    pages = np.full((2, 8, 2, groups, s.page_size, dim), nan, np.uint8 if s.fp8 else np.uint16)
    q = np.full((t, heads * dim), NAN_BITS[s.activation_dtype], np.uint16)
    q_norm, k_norm = rng.standard_normal((2, dim)).astype(np.float32)
    lanes = rope_append.lanes_per_head(dim, rot)
    emulate(rope_append.rope_append(s), [(-(-t * (heads + 2 * groups) * lanes // rope_append.THREADS),)],
            [rope_append.THREADS],
            {"qkv": qkv, "rope_table": table, "positions": positions, "slots": slots, "pages": pages, "q": q,
             "q_norm": q_norm, "k_norm": k_norm}, {"t": t, "p": 8, "layer": 1})
    x = from_bits(qkv, s.activation_dtype).reshape(t, -1, dim)
    values = x[:, heads + groups:]
    if s.qk_norm_epsilon is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + s.qk_norm_epsilon)
        x = np.concatenate([x[:, :heads] * q_norm, x[:, heads:heads + groups] * k_norm], 1)
    row = table[positions].astype(np.float64)[:, None]
    cos, sin, a, b = row[..., :rot // 2], row[..., rot // 2:], x[..., :rot // 2], x[..., rot // 2:rot]
    turned = np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., rot:]], -1)
    written = from_bits(pages[1, slots // s.page_size, :, :, slots % s.page_size], s.kv_dtype)
    limit = TOLERANCE[s.activation_dtype]
    assert relative_error(from_bits(q, s.activation_dtype).reshape(t, heads, dim), turned[:, :heads]) < limit
    keys = turned[:, heads:heads + groups]
    assert relative_error(written[:, 0], from_bits(to_bits(keys, FP8), FP8) if s.fp8 else keys) < limit
    np.testing.assert_array_equal(written[:, 1], from_bits(to_bits(values, s.kv_dtype), s.kv_dtype))
    untouched = np.ones((8, s.page_size), bool)
    untouched[slots // s.page_size, slots % s.page_size] = False
    assert (pages[1].transpose(0, 3, 1, 2, 4)[untouched] == nan).all() and (pages[0] == nan).all()


def test_e4m3_pages_hold_rounded_and_saturated_numbers() -> None:
    """Every bfloat16 pattern as a value: ties go to even, what is beyond 448 (infinities too) becomes 448, a NaN stays
    0x7F; bytes 0x00 to 0x7E and their negatives come back as what they are."""
    s = spec(1, 1, 64, kv=FP8)
    patterns = np.arange(65536, dtype=np.uint16)
    t, positions = 1024, np.zeros(1024, np.int32)
    qkv = np.zeros((t, 3, 64), np.uint16)
    qkv[:, 2] = patterns.reshape(t, 64)
    pages = np.full((2, 64, 2, 1, 16, 64), 0x55, np.uint8)
    emulate(rope_append.rope_append(s), [(-(-t * 3 * rope_append.lanes_per_head(64, 64) // rope_append.THREADS),)],
            [rope_append.THREADS],
            {"qkv": qkv.reshape(t, -1), "rope_table": np.zeros((s.max_position, 64), np.float32), "positions": positions,
             "slots": np.arange(t, dtype=np.int32), "pages": pages, "q": np.empty((t, 64), np.uint16)},
            {"t": t, "p": 64, "layer": 1})
    stored = pages[1, :, 1].reshape(-1)
    with np.errstate(invalid="ignore"):                  # signalling NaNs
        values = from_bits(patterns, "bfloat16")
    finite = np.isfinite(values)
    np.testing.assert_array_equal(stored[finite], to_bits(values[finite], FP8))
    np.testing.assert_array_equal(stored[np.isinf(values)], np.where(values[np.isinf(values)] > 0, 0x7E, 0xFE))
    assert (stored[np.isnan(values)] == 0x7F).all()


OFF = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0, "typical": 1.0}
PENALTIES = {"repetition": 1.3, "presence": 0.5, "frequency": 0.2}


@pytest.mark.parametrize(("vocab", "constrained"), [(10000, False), (5003, True)])
def test_sampling_equals_float64_reference(vocab: int, constrained: bool) -> None:
    rows: list[tuple[dict[str, float], int, bool, str]] = [        # settings, top_k, with counts and edits, kind of logits
        ({"temperature": 0}, 0, False, ""), ({"temperature": 0}, 0, False, "tie"), ({}, 0, False, ""),
        ({}, 0, False, "nan"), ({"temperature": 0.7}, 40, False, ""), ({"top_p": 0.9}, 0, False, ""),
        ({"top_p": 0.5, "min_p": 0.05}, 100, False, ""), ({"min_p": 0.1}, 0, False, ""),
        ({"top_p": 0.95, **PENALTIES}, 50, True, ""), ({"temperature": 0, **PENALTIES}, 0, True, ""), ({}, 0, True, ""),
        ({"temperature": 0.1, "top_p": 0.99}, 30, True, ""), ({}, 0, False, "half"), ({"top_p": 0.9}, 0, False, "flat"),
        ({}, 1, False, ""), ({"top_p": 0.9}, 6000, False, "flat"), ({"top_p": 1e-6}, 0, False, ""), ({}, 0, False, "inf"),
        ({}, 5, False, "none"), ({"typical": 0.9}, 0, False, ""), ({"typical": 0.4, "min_p": 0.01}, 0, True, ""),
        ({"typical": 0.7, "top_p": 0.95}, 200, False, ""), ({"typical": 0.6}, 0, False, "flat"),
        ({"typical": 0.3, "top_p": 0.8, **PENALTIES}, 3000, True, "flat"),
        ({"temperature": 0, **PENALTIES}, 0, True, "stale"), ({"top_p": 0.9, **PENALTIES}, 0, True, "stale"),
        ({}, 0, False, "forbidden"), ({"top_p": 0.9}, 0, False, "forbidden")]
    rng, b = np.random.default_rng(vocab), len(rows)
    logits = (rng.standard_normal((b, vocab)) * 3).astype(np.float32)
    settings, counters = np.zeros((b, 8), np.float32), np.zeros((b, 8), np.int32)
    counters[:, 1:4] = rng.integers(0, 2**31, (b, 3))
    counts = sampling_case.random_counts(rng, b, vocab)
    bits = rng.integers(-2**31, 2**31, (b // 2 + 1, -(-vocab // 32))).astype(np.int32)
    bits[0] = 0
    counters[:, 5] = -1
    if constrained:
        counters[1::2, 5] = rng.permutation(b // 2) + 1
    for i, (own, top_k, counted, kind) in enumerate(rows):
        settings[i, :7] = list({**OFF, **own}.values())
        counters[i, 0], counters[i, 4] = top_k, i if counted else -1
        logits[i, [5, vocab - 1] if kind == "tie" else []] = 20
        logits[i, vocab // 2] = {"nan": np.nan, "inf": np.inf}.get(kind, logits[i, vocab // 2])
        logits[i, ::2] = -np.inf if kind == "half" else logits[i, ::2]
        logits[i] = {"flat": logits[i] * 0.01, "none": np.full(vocab, -np.inf)}.get(kind, logits[i])
        if kind == "stale":             # a dropped step has drawn the likeliest token for this position, the first time
            counts[i, vocab:vocab + 2] = likeliest, _ = logits[i].argmax(), counters[i, 3]
            counts[i, likeliest] = 1
        counters[i, 5] = 0 if kind == "forbidden" and constrained else counters[i, 5]
    before = counts.copy()
    drawn = np.full((b + 1, 2), -9, np.int32)
    kernel = sample(SamplingSpec(vocab, constrained))
    emulate(kernel, [(sampling_scan.scan_blocks(vocab), b), (b,)], [sampling_scan.SCAN_THREADS, sampling_pick.THREADS],
            {"logits": logits, "settings": settings, "counters": counters, "counts": counts, "allowed": bits,
             "drawn": drawn}, {"b": b, "c": b, "d": b + 1, "m": len(bits)})
    assert (drawn[b] == -9).all()
    tokens, logprobs = drawn[:b, 0], drawn[:b, 1].copy().view(np.float32)
    expected = before.copy()
    for i in range(b):
        mask = counters[i, 5]
        allowed = (bits[mask].view(np.uint32)[np.arange(vocab) // 32] >> (np.arange(vocab) % 32) & 1) > 0
        token, logprob, scores = sampling_case.expect(
            logits[i], settings[i], counters[i], before[i] if counters[i, 4] >= 0 else None, allowed if mask >= 0 else None)
        assert tokens[i] == token or scores[token] - scores[tokens[i]] < 1e-4, (i, rows[i], tokens[i], token)
        assert np.isnan(logprobs[i]) if token < 0 else abs(logprobs[i] - logprob) < 1e-4 or tokens[i] != token
        if counters[i, 4] >= 0:
            sampling_case.count(expected[i], int(tokens[i]), int(counters[i, 3]))
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize("vocab", [17000, 5003, 11])
def test_top_logprobs_equal_float64_reference(vocab: int) -> None:
    rng, kinds = np.random.default_rng(vocab), ("", "large", "flat", "ties", "few")
    logits = (rng.standard_normal((len(kinds), vocab)) * 3).astype(np.float32)
    logits[1] *= 1000
    logits[2] = 1.5
    logits[3] = logits[3].round()
    logits[4, rng.permutation(vocab)[min(7, vocab // 2):]] = -np.inf
    counters = np.zeros((len(kinds), 8), np.int32)
    counters[:, 6] = (0, 5, TOP_LOGPROBS + 3, 1, TOP_LOGPROBS)
    ids, found = np.full((len(kinds), TOP_LOGPROBS), -9, np.int32), np.full((len(kinds), TOP_LOGPROBS), np.nan, np.float32)
    emulate(top_logprobs_kernel.top_logprobs(vocab), [(top_logprobs_kernel.group_blocks(vocab), len(kinds)), (len(kinds),)],
            [top_logprobs_kernel.GROUP_THREADS, 32],
            {"logits": logits, "counters": counters, "top_ids": ids, "top_logprobs": found}, {"b": len(kinds)})
    for i, kind in enumerate(kinds):
        most = min(vocab, TOP_LOGPROBS, counters[i, 6])
        z = logits[i].astype(np.float64)
        best = np.argsort(-z, kind="stable")[:most]
        np.testing.assert_array_equal(ids[i, :most], best, kind)
        expected = z[best] - z.max() - np.log(np.exp(z - z.max()).sum())
        np.testing.assert_allclose(found[i, :most], expected, rtol=1e-6, atol=1e-5, err_msg=kind)
        assert (ids[i, counters[i, 6]:] == -9).all() and np.isnan(found[i, counters[i, 6]:]).all()


KERNELS = {
    "top_logprobs": lambda arch: top_logprobs_kernel.top_logprobs(128256, arch),
    "rope": lambda arch: rope_append.rope_append(spec(32, 8, 128, norm=1e-6), arch),
    "decode": lambda arch: decode_attention(spec(32, 8, 128), arch),
    "decode_256": lambda arch: decode_attention(spec(8, 4, 256, 64, window=512), arch),
    "prefill": lambda arch: prefill_attention(spec(32, 8, 128), arch),
    "prefill_64": lambda arch: prefill_attention(spec(32, 8, 64, dtype="float16"), arch),
    "rope_e4m3": lambda arch: rope_append.rope_append(spec(32, 8, 128, kv=FP8), arch),
    "decode_e4m3": lambda arch: decode_attention(spec(32, 8, 128, kv=FP8), arch),
    "decode_64_e4m3": lambda arch: decode_attention(spec(32, 8, 64, kv=FP8), arch),
    "prefill_e4m3": lambda arch: prefill_attention(spec(32, 8, 128, kv=FP8), arch),
    "prefill_64_e4m3": lambda arch: prefill_attention(spec(32, 8, 64, kv=FP8), arch),
    "prefill_96_e4m3": lambda arch: prefill_attention(spec(32, 8, 96, kv=FP8), arch),
    "prefill_256_e4m3": lambda arch: prefill_attention(spec(16, 8, 256, kv=FP8), arch),
    "sample": lambda arch: sample(SamplingSpec(128256), arch),
}


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith(("rope", "decode", "prefill"))])
def test_pages_may_have_more_elements_than_32_bits_count(name: str) -> None:
    """TVM compares a stride in the type of its extent: a layer of 2^31 elements needs that of the layers in 64 bits."""
    func = KERNELS[name]("sm_90a").stages[0].func
    (pages,) = [parameter for parameter in func.params if parameter.name == "pages"]
    assert str(pages.ty.shape[0].ty.dtype) == "int64"


@pytest.mark.slow
@pytest.mark.skipif(not harness.have_compiler(), reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"])
def test_kernels_compile_without_local_memory(arch: str) -> None:
    funcs = {f"{name}_{i}": stage.func for name, make in KERNELS.items() for i, stage in enumerate(make(arch).stages)}
    found = harness.resources(harness.generate_source(funcs, arch), arch)
    assert len(found) == len(funcs) + 2 * (arch == "sm_90a")      # heads of 64 have another prefill kernel for few tokens
    for kernel in found:
        assert kernel.stack == kernel.spill_stores == kernel.spill_loads == 0, kernel
        assert kernel.registers <= 255


@pytest.mark.parametrize("arch", sorted(LIMITS))
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kv", ["bfloat16", FP8])
def test_default_tunings_fit_shared_memory(arch: str, head_dim: int, kv: str) -> None:
    s = spec(32, 8, head_dim, kv=kv)
    limit = LIMITS[arch][0] * 1024
    tuning = default_tuning(s, arch)
    assert shared_bytes(s, tuning) <= limit
    assert attention_prefill.shared_bytes(s, attention_prefill.default_tuning(s, arch)) <= limit
    assert attention_prefill_hopper_tuning.supported(s) == (head_dim in (64, 128, 256))


def test_e4m3_pages_take_wgmma_where_it_can() -> None:
    for head_dim, arch, page_size, kernel in (
            (64, "sm_90a", 16, "_hopper"), (64, "sm_90a", 64, "_hopper"), (128, "sm_90a", 16, "_hopper"),
            (256, "sm_90a", 8, "_hopper"), (96, "sm_90a", 16, ""), (128, "sm_90", 16, ""), (128, "sm_90a", 48, "")):
        s = spec(32, 8, head_dim, page_size, kv=FP8)
        assert prefill_attention(s, arch).source == "rule:cuda.prefill_attention" + kernel, (head_dim, arch, page_size)
    assert not attention_prefill_hopper_tuning.fits(spec(head_dim=96, kv=FP8), HopperTuning())
    assert not attention_prefill_hopper_tuning.fits(spec(head_dim=128, kv=FP8), HopperTuning(raw_stages=8))


def test_seven_warps_convert_where_registers_are_left_for_them() -> None:
    for head_dim, kv, consumers, producers in ((128, FP8, 2, 8), (64, FP8, 2, 8), (64, FP8, 3, 4), (256, FP8, 2, 4),
                                               (128, "bfloat16", 2, 4), (64, "bfloat16", 3, 4)):
        tuning, s = HopperTuning(consumers), spec(32, 8, head_dim, kv=kv)
        assert tuning.producers(s) == producers
        fewer, more = tuning.registers(s)
        assert producers * 32 * fewer + consumers * 128 * more <= 65536 and not (fewer % 8 or more % 8)


def test_few_tokens_of_narrow_heads_take_narrow_tiles() -> None:
    for kv, threads, registers in (("bfloat16", 384, 232), (FP8, 512, 200)):      # e4m3: two warpgroups fetch and convert
        script = prefill_attention(spec(32, 8, 64, kv=kv)).stages[0].func.script()
        few, many = script.split("if t <= T.int64(528):")[1].split("T.cta_id")[1:]
        assert f"T.thread_id([{threads}])" in few and f'({registers}, "inc"' in few
        assert "T.thread_id([512])" in many and f'({registers}, "inc"' not in many
        assert "if t <=" not in prefill_attention(spec(32, 8, 128, kv=kv)).stages[0].func.script()
    assert "if t <=" not in prefill_attention(spec(32, 8, 64, 64, kv=FP8)).stages[0].func.script()      # narrow anyway


@pytest.mark.parametrize(("page_size", "source"), [
    (16, "prefill_attention_hopper"), (256, "prefill_attention_hopper"), (8, "prefill_attention_hopper"),
    (4, "prefill_attention"), (48, "prefill_attention")])
def test_pages_that_no_bulk_copy_fits_take_the_portable_kernel(page_size: int, source: str) -> None:
    assert prefill_attention(spec(head_dim=128, page_size=page_size)).source == "rule:cuda." + source


@pytest.mark.parametrize(("make", "message"), [
    (lambda: decode_attention(spec(dtype="float32")), "bfloat16"),
    (lambda: prefill_attention(spec(dtype="int8")), "bfloat16"),
    (lambda: decode_attention(spec(head_dim=80, kv=FP8)), "multiples of 32"),
    (lambda: prefill_attention(spec(kv="float16")), "or with --kv-dtype fp8"),
    (lambda: decode_attention(spec(7, 2)), "multiple"), (lambda: prefill_attention(spec(head_dim=72)), "multiples of 16"),
    (lambda: rope_append.rope_append(spec(head_dim=65, rotary_dim=65)), "even")])
def test_impossible_specs_are_refused_with_a_reason(make: Any, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        make()
