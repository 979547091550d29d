"""Sampling, stage two: one block a row combines what stage one found and, where top_k, top_p or min_p is set, bounds how far
a kept logit can lie from the maximum, collects the candidates within that distance and ranks them; more candidates than
fit are narrowed by a radix search over the distance first. Counts and probability masses are integers, so the answer
does not depend on the order of atomics.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import SamplingSpec
from relaxpack.schedules.kernels.cuda.common import with_handles
from relaxpack.schedules.kernels.cuda.fragments import AWAIT, FULL_MASK, RELEASE, shuffle_xor
from relaxpack.schedules.kernels.cuda.sampling_few import draw_from_few
from relaxpack.schedules.kernels.cuda.sampling_parts import (
    COUNTS_ROW,
    MIN_P,
    POSITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    sampling_parts,
)
from relaxpack.schedules.kernels.cuda.sampling_radix import draw_from_many
from relaxpack.schedules.kernels.cuda.sampling_scan import PART_TOPS, sampling_buffers, scan_blocks
from relaxpack.schedules.kernels.cuda.sampling_state import (
    DISTANCE_LIMIT,
    KEY_BITS,
    KEY_SCALE,
    MASS_BITS,
    THREADS,
    WARPS,
    pick_state,
)
from relaxpack.schedules.kernels.cuda.sampling_tokens import token_parts
from tvm.script import tirx as T


def sample_pick_function(spec: SamplingSpec, early: bool) -> Any:
    """The PrimFunc of stage two: logits, settings, counters, counts, [allowed], sums, picks, tops, drawn."""
    V, BLOCKS = spec.vocab_size, scan_blocks(spec.vocab_size)
    MAXIMA = BLOCKS * PART_TOPS
    parts = sampling_parts(spec)
    better, combine_sums, filtered, find_stale = parts.better, parts.combine_sums, parts.filtered, parts.find_stale
    gather, from_few, from_many = token_parts(spec).gather, draw_from_few(spec), draw_from_many(spec)

    @T.inline
    def combine(s):
        # what stage one found, combined by warp 0 in a fixed order
        if s.warp == 0:
            s.peak = T.float32("-inf")
            s.total = T.float32(0)
            s.best = T.float32("-inf")
            s.best_token = V
            s.score = T.float32("-inf")
            s.score_token = V
            s.bad = 0
            s.value = T.float32("-inf")
            s.norm = T.float32(0)
            s.index = s.lane
            while s.index < BLOCKS:
                combine_sums(s.peak, s.total, s.sums[s.row, s.index, 0], s.sums[s.row, s.index, 1])
                combine_sums(s.value, s.norm, s.sums[s.row, s.index, 2], s.sums[s.row, s.index, 4])
                better(s.best, s.best_token, s.sums[s.row, s.index, 2], s.picks[s.row, s.index, 0])
                better(s.score, s.score_token, s.sums[s.row, s.index, 3], s.picks[s.row, s.index, 1])
                s.bad = s.bad | s.picks[s.row, s.index, 2]
                s.index = s.index + 32
            for i in T.unroll(5):
                s.distance = shuffle_xor(s.value, 1 << i)
                s.noise = shuffle_xor(s.norm, 1 << i)
                combine_sums(s.value, s.norm, s.distance, s.noise)
                s.distance = shuffle_xor(s.peak, 1 << i)
                s.noise = shuffle_xor(s.total, 1 << i)
                combine_sums(s.peak, s.total, s.distance, s.noise)
                s.distance = shuffle_xor(s.best, 1 << i)
                s.other = shuffle_xor(s.best_token, 1 << i)
                better(s.best, s.best_token, s.distance, s.other)
                s.distance = shuffle_xor(s.score, 1 << i)
                s.other = shuffle_xor(s.score_token, 1 << i)
                better(s.score, s.score_token, s.distance, s.other)
                s.bad = s.bad | shuffle_xor(s.bad, 1 << i)
            if s.lane == 0:
                s.shared_f[3] = s.norm
                s.shared_f[0] = s.peak
                s.shared_f[1] = s.total
                s.shared_f[2] = s.best
                s.shared_i[0] = s.best_token
                s.shared_i[1] = s.score_token
                s.shared_i[2] = T.if_then_else(T.Or(s.bad != 0, s.peak == T.float32("-inf")), 1,
                                             T.if_then_else(s.best == T.float32("-inf"), 2, 0))
                s.found[3] = 0
        T.cuda.cta_sync()
        s.peak = s.shared_f[0]
        s.total = s.shared_f[1]
        s.best = s.shared_f[2]
        s.best_token = s.shared_i[0]
        s.token = s.shared_i[1]
        s.bad = s.shared_i[2]

    @T.inline
    def bound(s):
        # which filters a row has, and how far from the maximum a kept token can be
        s.scale = T.float32(1) / s.settings[s.row, TEMPERATURE]
        s.norm = s.shared_f[3]
        s.from_list = 0
        s.items = 0
        s.need_k = T.if_then_else(T.And(s.counters[s.row, TOP_K] > 0, s.counters[s.row, TOP_K] < V), 1, 0)
        s.need_p = T.if_then_else(s.settings[s.row, TOP_P] < T.float32(1), 1, 0)
        s.need_t = T.if_then_else(s.settings[s.row, TYPICAL_P] < T.float32(1), 1, 0)
        s.kept_mass = T.Cast("uint64", s.norm * T.float32(1 << MASS_BITS))
        s.typical_cut = T.uint32(FULL_MASK)
        s.centre = 0
        s.step = 0
        s.level = 0
        s.distance = T.float32(DISTANCE_LIMIT)
        if T.And(s.need_k == 1, s.counters[s.row, TOP_K] <= MAXIMA):
            # at least top_k tokens reach the top_k-th largest of the partial maxima
            s.index = s.tx
            while s.index < MAXIMA:
                s.maxima[s.index] = s.tops[s.row, s.index]
                s.index = s.index + THREADS
            T.cuda.cta_sync()
            s.index = s.tx
            while s.index < MAXIMA:
                s.value = s.maxima[s.index]
                s.other = 0
                for j in T.serial(MAXIMA // 16):
                    for i in T.unroll(16):
                        s.other = s.other + T.Cast("int32", T.Or(s.maxima[j * 16 + i] > s.value, T.And(
                            s.maxima[j * 16 + i] == s.value, j * 16 + i < s.index)))
                if s.other == s.counters[s.row, TOP_K] - 1:
                    s.shared_f[3] = s.value
                s.index = s.index + THREADS
            T.cuda.cta_sync()
            s.distance = T.min(s.distance, s.best - s.shared_f[3])
        elif T.And(s.need_k == 0, s.need_p == 1):
            # all tokens beyond this distance together hold less than 1 - top_p
            s.value = T.max(T.float32(1) - s.settings[s.row, TOP_P], T.float32(1e-7)) * s.norm
            s.distance = T.min(s.distance, T.log(T.float32(V) / s.value) + T.float32(0.01))
        elif s.need_k == 0:
            s.distance = T.min(s.distance, T.max(-T.log(s.settings[s.row, MIN_P]), T.float32(0)))
        s.reach = T.max(s.distance, T.float32(0)) + T.float32(1e-5)
        s.cut = T.Cast("uint32", T.max(s.distance, T.float32(0)) * T.float32(KEY_SCALE))
        s.min_cut = T.uint32((1 << KEY_BITS) - 1)
        if s.settings[s.row, MIN_P] > T.float32(0):
            s.distance = T.min(T.max(-T.log(s.settings[s.row, MIN_P]), T.float32(0)), T.float32(DISTANCE_LIMIT))
            s.min_cut = T.Cast("uint32", s.distance * T.float32(KEY_SCALE))

    @T.inline
    def draw(s):
        bound(s)
        gather(s)
        s.score = T.float32("-inf")
        s.score_token = V
        if s.items <= THREADS:
            from_few(s)
        else:
            from_many(s)
        for i in T.unroll(5):
            s.value = shuffle_xor(s.score, 1 << i)
            s.other = shuffle_xor(s.score_token, 1 << i)
            better(s.score, s.score_token, s.value, s.other)
        T.cuda.cta_sync()
        if s.lane == 0:
            s.shared_f[s.warp] = s.score
            s.shared_i[s.warp] = s.score_token
        T.cuda.cta_sync()
        for w in T.unroll(WARPS):
            better(s.score, s.score_token, s.shared_f[w], s.shared_i[w])
        s.token = s.score_token

    @T.inline
    def answer(s):
        if s.tx == 0:
            if s.bad != 0:
                s.drawn[s.row, 0] = -s.bad
                s.drawn[s.row, 1] = 0x7FC00000
            else:
                s.drawn[s.row, 0] = s.token
                s.drawn[s.row, 1] = T.reinterpret("int32", s.logits[s.row, s.token] - s.peak - T.log(s.total))
                if s.counts_row >= 0:
                    if s.stale >= 0:
                        s.counts[s.counts_row, s.stale] = s.counts[s.counts_row, s.stale] - 1
                    s.counts[s.counts_row, s.token] = s.counts[s.counts_row, s.token] + 1
                    s.counts[s.counts_row, V] = s.token
                    s.counts[s.counts_row, V + 1] = s.counters[s.row, POSITION]

    @T.inline
    def pick(s):
        if early:
            T.ptx[AWAIT]()
            T.ptx[RELEASE]()
        combine(s)
        s.counts_row = s.counters[s.row, COUNTS_ROW]
        find_stale(s.stale, s.counts, s.counts_row, s.counters, s.row)
        s.scale = T.float32(1)
        if s.settings[s.row, TEMPERATURE] <= T.float32(0):
            s.token = s.best_token
        elif T.And(s.bad == 0, filtered(s.settings, s.counters, s.row)):
            draw(s)
        answer(s)

    @T.inline
    def bind(handles):
        b = T.int64()
        d = T.int64()
        buffers = T.meta_var(sampling_buffers(spec, handles[:-1], b))
        drawn = T.match_buffer(handles[-1], (d, 2), "int32")
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        row = T.cta_id([T.Cast("int32", b)])
        tx = T.thread_id([THREADS])
        pool = T.SMEMPool()
        s = T.meta_var(pick_state(spec, pool, tx, row=row, drawn=drawn, **buffers))
        pick(s)

    return with_handles(8 + spec.constrained, bind)
