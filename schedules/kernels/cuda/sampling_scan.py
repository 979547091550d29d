"""Sampling, stage one: many blocks a row find the maximum, the softmax sums, bad values, the greedy choice and, for rows
without a filter, the drawn token. For rows with one they leave partial maxima, from which stage two bounds its search.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import SamplingSpec, counts_width
from relaxpack.schedules.kernels.cuda.common import with_handles
from relaxpack.schedules.kernels.cuda.fragments import AWAIT, EXP2, FULL_MASK, LOG2_E, RELEASE, shuffle_xor
from relaxpack.schedules.kernels.cuda.sampling_parts import (
    COUNTS_ROW,
    POSITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    sampling_parts,
)
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

SCAN_THREADS, SCAN_VECTORS = 256, 4          # 4096 logits a block
SCAN_LOGITS = SCAN_THREADS * SCAN_VECTORS * 4
PART_TOPS = SCAN_THREADS // 16                    # maxima of 256 logits each that are left for stage two


def scan_blocks(vocab_size: int) -> int:
    return -(-vocab_size // SCAN_LOGITS)


def scan_shared(pool: Any) -> tuple[Any, Any]:
    warps = SCAN_THREADS // 32
    return pool.alloc((5, warps), "float32", align=16), pool.alloc((3, warps), "int32", align=16)


def scan_part(spec: SamplingSpec, early: bool, fresh: bool = False) -> Any:
    """Inline: what a block of SCAN_THREADS threads finds in one part of a row. `fresh`: the logits were written by other
    blocks of the same kernel. `scan_shared` makes its first two arguments."""
    V, SCAN_WARPS = spec.vocab_size, SCAN_THREADS // 32
    parts = sampling_parts(spec, fresh)
    philox, gumbel, load4, load_counts4 = parts.philox, parts.gumbel, parts.load4, parts.load_counts4
    adjust, better, combine_sums, filtered = parts.adjust, parts.better, parts.combine_sums, parts.filtered
    find_stale = parts.find_stale

    @T.inline
    def scan(shared_f, shared_i, logits, settings, counters, counts, allowed, sums, picks, tops, part, row, tx):
        lane = T.meta_var(tx % 32)
        warp = T.meta_var(tx // 32)
        x = T.alloc_buffer((4 * SCAN_VECTORS,), "float32", scope="local")
        seen = T.alloc_buffer((4 * SCAN_VECTORS,), "int32", scope="local")
        word = T.alloc_buffer((4,), "uint32", scope="local")
        key = T.alloc_buffer((6,), "uint32", scope="local")
        peak: T.float32                       # of the raw logits
        total: T.float32
        best: T.float32                       # of the adjusted logits
        mass: T.float32
        best_token: T.int32
        score: T.float32                      # of adjusted logits plus noise
        score_token: T.int32
        bad: T.int32
        counts_row: T.int32
        stale: T.int32
        scale: T.float32
        noisy: T.int32
        narrow: T.int32
        value: T.float32
        noise: T.float32
        other: T.int32
        first: T.int32
        if early:
            T.ptx[AWAIT]()
            T.ptx[RELEASE]()
        for j in T.unroll(SCAN_VECTORS):
            load4(x, logits, row, ((part * SCAN_VECTORS + j) * SCAN_THREADS + tx) * 4, j * 4)
        counts_row = counters[row, COUNTS_ROW]
        scale = T.if_then_else(settings[row, TEMPERATURE] > T.float32(0), T.float32(1) / settings[row, TEMPERATURE],
                               T.float32(1))
        narrow = T.if_then_else(T.And(settings[row, TEMPERATURE] > T.float32(0), filtered(settings, counters, row)), 1, 0)
        noisy = T.if_then_else(T.And(settings[row, TEMPERATURE] > T.float32(0), narrow == 0), 1, 0)
        for j in T.unroll(SCAN_VECTORS):
            load_counts4(seen, counts, counts_row, ((part * SCAN_VECTORS + j) * SCAN_THREADS + tx) * 4, j * 4)
        find_stale(stale, counts, counts_row, counters, row)
        # raw logits: maximum, sum, anything that is not a number
        peak = T.float32("-inf")
        bad = 0
        for i in T.unroll(4 * SCAN_VECTORS):
            peak = T.max(peak, x[i])
            bad = bad | T.if_then_else(T.And((T.cuda.float_as_uint(x[i]) & T.uint32(0x7F800000)) == T.uint32(0x7F800000),
                                             T.cuda.float_as_uint(x[i]) != T.uint32(0xFF800000)), 1, 0)
        bad = T.Cast("int32", T.cuda.ballot_sync(T.uint32(FULL_MASK), bad))
        for i in T.unroll(5):
            peak = T.max(peak, shuffle_xor(peak, 1 << i))
        total = T.float32(0)
        if peak > T.float32("-inf"):
            for i in T.unroll(4 * SCAN_VECTORS):
                T.ptx[EXP2](value, (x[i] - peak) * T.float32(LOG2_E))
                total = total + value
        for i in T.unroll(5):
            total = total + shuffle_xor(total, 1 << i)
        # adjusted logits: maximum and its lowest token, the draw
        best = T.float32("-inf")
        best_token = V
        score = T.float32("-inf")
        score_token = V
        for j in T.unroll(SCAN_VECTORS):
            first = ((part * SCAN_VECTORS + j) * SCAN_THREADS + tx) * 4
            if noisy == 1:
                philox(word, key, first, counters[row, POSITION], counters[row, SEED_LOW], counters[row, SEED_HIGH])
            for i in T.unroll(4):
                value = x[j * 4 + i]
                if value > T.float32("-inf"):
                    adjust(value, seen[j * 4 + i], first + i, row, settings, counters, counts, counts_row, stale,
                           allowed, scale)
                    better(best, best_token, value, first + i)
                    x[j * 4 + i] = value
                    if noisy == 1:
                        gumbel(noise, word[i])
                        better(score, score_token, value + noise, first + i)
        for i in T.unroll(5):
            value = shuffle_xor(best, 1 << i)
            other = shuffle_xor(best_token, 1 << i)
            better(best, best_token, value, other)
            if i == 3:
                if T.And(narrow == 1, lane % 16 == 0):
                    tops[row, part * PART_TOPS + warp * 2 + lane // 16] = best
        if noisy == 1:
            for i in T.unroll(5):
                value = shuffle_xor(score, 1 << i)
                other = shuffle_xor(score_token, 1 << i)
                better(score, score_token, value, other)
        mass = T.float32(0)
        if T.And(narrow == 1, best > T.float32("-inf")):
            for i in T.unroll(4 * SCAN_VECTORS):
                T.ptx[EXP2](value, (x[i] - best) * T.float32(LOG2_E))
                mass = mass + value
            for i in T.unroll(5):
                mass = mass + shuffle_xor(mass, 1 << i)
        if lane == 0:
            shared_f[0, warp] = peak
            shared_f[1, warp] = total
            shared_f[2, warp] = best
            shared_f[3, warp] = score
            shared_f[4, warp] = mass
            shared_i[0, warp] = best_token
            shared_i[1, warp] = score_token
            shared_i[2, warp] = bad
        T.cuda.cta_sync()
        if tx == 0:
            value = best
            for w in T.unroll(SCAN_WARPS - 1):
                combine_sums(peak, total, shared_f[0, w + 1], shared_f[1, w + 1])
                combine_sums(value, mass, shared_f[2, w + 1], shared_f[4, w + 1])
                better(best, best_token, shared_f[2, w + 1], shared_i[0, w + 1])
                better(score, score_token, shared_f[3, w + 1], shared_i[1, w + 1])
                bad = bad | shared_i[2, w + 1]
            sums[row, part, 0] = peak
            sums[row, part, 1] = total
            sums[row, part, 2] = best
            sums[row, part, 3] = score
            sums[row, part, 4] = mass
            picks[row, part, 0] = best_token
            picks[row, part, 1] = score_token
            picks[row, part, 2] = bad

    return scan


def sampling_buffers(spec: SamplingSpec, handles: Any, b: Any) -> dict[str, Any]:
    """The buffers of `b` rows that both stages have, by name, matched while a script is parsed: what a step gives and what
    stage one leaves. `allowed` is None for a spec without masks."""
    V, blocks = spec.vocab_size, scan_blocks(spec.vocab_size)
    shapes = {"logits": ((b, V), "float32", 16), "settings": ((b, 8), "float32", -1), "counters": ((b, 8), "int32", -1),
              "counts": ((_size("c"), counts_width(V)), "int32", 16)}
    if spec.constrained:
        shapes["allowed"] = ((_size("m"), -(-V // 32)), "int32", -1)
    shapes |= {"sums": ((b, blocks, 5), "float32", -1), "picks": ((b, blocks, 3), "int32", -1),
               "tops": ((b, blocks * PART_TOPS), "float32", -1)}
    found = {name: IRBuilder.name(name, T.match_buffer(handle, shape, dtype, align=align))
             for handle, (name, (shape, dtype, align)) in zip(handles, shapes.items(), strict=True)}
    return {"allowed": None, **found}


def _size(name: str) -> Any:
    return IRBuilder.name(name, T.int64())


def sample_scan_function(spec: SamplingSpec, early: bool) -> Any:
    """The PrimFunc of stage one: logits, settings, counters, counts, [allowed], sums, picks, tops."""
    scan = scan_part(spec, early)

    @T.inline
    def bind(handles):
        b = T.int64()
        s = T.meta_var(SimpleNamespace(**sampling_buffers(spec, handles, b)))
        T.device_entry()
        part, row = T.cta_id([scan_blocks(spec.vocab_size), T.Cast("int32", b)])
        tx = T.thread_id([SCAN_THREADS])
        pool = T.SMEMPool()
        shared_f, shared_i = T.meta_var(scan_shared(pool))
        pool.commit()
        scan(shared_f, shared_i, s.logits, s.settings, s.counters, s.counts, s.allowed, s.sums, s.picks, s.tops, part, row,
             tx)

    return with_handles(7 + spec.constrained, bind)
