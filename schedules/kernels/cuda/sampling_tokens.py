"""How stage two of sampling looks at tokens: a sweep over the row, the list of candidates gathered from it, and what a visit
does with one, be it counting it into a histogram of distances or drawing it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import SamplingSpec
from relaxpack.schedules.kernels.cuda.fragments import EXP2, FULL_MASK, LOG2_E, shuffle, shuffle_xor
from relaxpack.schedules.kernels.cuda.sampling_parts import POSITION, SEED_HIGH, SEED_LOW, sampling_parts
from relaxpack.schedules.kernels.cuda.sampling_state import (
    CANDIDATES,
    DISTANCE_LIMIT,
    KEY_SCALE,
    MASS_BITS,
    MASS_HALF,
    THREADS,
    VECTORS,
    WARPS,
)
from tvm.script import tirx as T


def deviation(item_key: Any, centre: Any) -> Any:
    return T.Cast("uint32", T.max(T.Cast("int32", item_key) - centre, centre - T.Cast("int32", item_key)))


def token_parts(spec: SamplingSpec) -> SimpleNamespace:
    """Script functions over a `pick_state`, by name."""
    V, MASKED = spec.vocab_size, spec.constrained
    parts = sampling_parts(spec)
    philox, gumbel, load4, load_counts4 = parts.philox, parts.gumbel, parts.load4, parts.load_counts4
    adjust, better = parts.adjust, parts.better

    @T.inline
    def weigh(s):
        T.ptx[EXP2](s.noise, s.distance * T.float32(-LOG2_E))
        s.mass = T.Cast("uint32", s.noise * T.float32(1 << MASS_BITS) + T.float32(0.5))

    @T.inline
    def add_moments(s):
        # of the distance, in integers: their sums do not depend on an order
        weigh(s)
        s.sum_mass = s.sum_mass + T.Cast("uint64", s.mass)
        s.passed = s.passed + T.Cast("uint64", s.noise * s.distance * T.float32(1 << MASS_BITS) + T.float32(0.5))

    @T.inline
    def find_centre(s):
        # the mean distance: a token's surprise is it plus a constant, so entropy and surprise differ as distances do
        for i in T.unroll(5):
            s.sum_mass = s.sum_mass + shuffle_xor(s.sum_mass, 1 << i)
            s.passed = s.passed + shuffle_xor(s.passed, 1 << i)
        T.cuda.cta_sync()
        if s.lane == 0:
            s.warp_mass[s.warp] = s.sum_mass
            s.warp_moment[s.warp] = s.passed
        T.cuda.cta_sync()
        s.all_mass = T.uint64(0)
        s.amount = T.uint64(0)
        for w in T.unroll(WARPS):
            s.all_mass = s.all_mass + s.warp_mass[w]
            s.amount = s.amount + s.warp_moment[w]
        s.centre = T.Cast("int32", T.Cast("float64", s.amount) / T.Cast("float64", s.all_mass) * T.float64(KEY_SCALE))
        T.cuda.cta_sync()

    @T.inline
    def visit(s, kind):
        # one token within reach: item_key, distance and index are set
        if kind == "histogram":
            if s.item_key <= s.cut:
                if s.step == 2:
                    s.item_key = deviation(s.item_key, s.centre)
                if s.level < 0:
                    add_moments(s)
                elif (s.item_key >> s.prefix_shift) == s.prefix:
                    weigh(s)
                    s.other = T.Cast("int32", (s.item_key >> s.shift) & s.bin_mask)
                    T.cuda.atomic_add(s.bin_count.ptr_to([s.other]), T.uint32(1))
                    T.cuda.atomic_add(s.bin_low.ptr_to([s.other]), s.mass & T.uint32((1 << MASS_HALF) - 1))
                    T.cuda.atomic_add(s.bin_high.ptr_to([s.other]), s.mass >> T.uint32(MASS_HALF))
        elif T.And(s.item_key <= s.cut, deviation(s.item_key, s.centre) <= s.typical_cut):
            philox(s.word, s.key, s.index, s.counters[s.row, POSITION], s.counters[s.row, SEED_LOW],
                   s.counters[s.row, SEED_HIGH])
            s.old = T.if_then_else(s.index % 4 < 2, T.if_then_else(s.index % 4 == 0, s.word[0], s.word[1]),
                                   T.if_then_else(s.index % 4 == 2, s.word[2], s.word[3]))
            gumbel(s.noise, s.old)
            better(s.score, s.score_token, s.noise - s.distance, s.index)

    @T.inline
    def sweep(s, kind):
        # the next round's logits are on their way while this round's are looked at
        for j in T.unroll(VECTORS):
            load4(s.ahead, s.logits, s.row, (j * THREADS + s.tx) * 4, j * 4)
        for j in T.unroll(VECTORS):
            load_counts4(s.seen_ahead, s.counts, s.counts_row, (j * THREADS + s.tx) * 4, j * 4)
        s.base = 0
        while s.base < V:
            for i in T.unroll(4 * VECTORS):
                s.x[i] = s.ahead[i]
                s.seen[i] = s.seen_ahead[i]
            for j in T.unroll(VECTORS):
                load4(s.ahead, s.logits, s.row, s.base + ((VECTORS + j) * THREADS + s.tx) * 4, j * 4)
            for j in T.unroll(VECTORS):
                load_counts4(s.seen_ahead, s.counts, s.counts_row, s.base + ((VECTORS + j) * THREADS + s.tx) * 4, j * 4)
            s.value = T.float32("-inf")
            for j in T.unroll(VECTORS):
                for i in T.unroll(4):
                    s.distance = s.x[j * 4 + i]
                    if MASKED or s.counts_row >= 0:
                        adjust(s.distance, s.seen[j * 4 + i], s.base + (j * THREADS + s.tx) * 4 + i, s.row, s.settings,
                               s.counters, s.counts, s.counts_row, s.stale, s.allowed, s.scale)
                    else:
                        s.distance = s.distance * s.scale
                    s.x[j * 4 + i] = s.distance
                    s.value = T.max(s.value, s.distance)
            # most rounds have no candidate in the whole warp
            if T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", s.best - s.value <= s.reach)) != T.uint32(0):
                for j in T.unroll(VECTORS):
                    for i in T.unroll(4):
                        s.index = s.base + (j * THREADS + s.tx) * 4 + i
                        s.distance = s.best - s.x[j * 4 + i]
                        s.keep = 0
                        if s.distance < T.float32(DISTANCE_LIMIT):
                            s.item_key = T.Cast("uint32", s.distance * T.float32(KEY_SCALE))
                            if kind == "gather":
                                s.keep = T.if_then_else(s.item_key <= s.cut, 1, 0)
                            else:
                                visit(s, kind)
                        if kind == "gather":
                            s.votes = T.cuda.ballot_sync(T.uint32(FULL_MASK), s.keep)
                            if s.votes != T.uint32(0):
                                if s.lane == 0:
                                    s.other = T.cuda.atomic_add(s.found.ptr_to([3]), T.Cast("int32", T.popcount(s.votes)))
                                s.other = shuffle(s.other, 0) + T.Cast("int32", T.popcount(
                                    s.votes & ((T.uint32(1) << T.Cast("uint32", s.lane)) - T.uint32(1))))
                                if T.And(s.keep == 1, s.other < CANDIDATES):
                                    s.list_key[s.other] = s.item_key
                                    s.list_token[s.other] = s.index
            s.base = s.base + THREADS * VECTORS * 4

    @T.inline
    def gather(s):
        # candidates with a key up to `cut` → the list; `items` counts them, also those that did not fit
        sweep(s, "gather")
        T.cuda.cta_sync()
        s.items = s.found[3]
        s.from_list = T.if_then_else(s.items <= CANDIDATES, 1, 0)
        T.cuda.cta_sync()

    @T.inline
    def walk(s, kind):
        # over the candidate list if there is one, else over the row
        if s.from_list == 1:
            s.base = s.tx
            while s.base < s.items:
                s.item_key = s.list_key[s.base]
                s.index = s.list_token[s.base]
                s.distance = T.Cast("float32", s.item_key) * T.float32(1.0 / KEY_SCALE)
                visit(s, kind)
                s.base = s.base + THREADS
        else:
            sweep(s, kind)

    @T.inline
    def mass_target(s, of, share):
        # the mass that a share of `of`, a setting of the row, comes to
        s.target = T.Cast("uint64", T.ceil(T.Cast("float64", s.settings[s.row, share]) * T.Cast("float64", of)))
        s.target = T.max(T.min(s.target, of), T.uint64(1))

    return SimpleNamespace(weigh=weigh, add_moments=add_moments, find_centre=find_centre, visit=visit, gather=gather,
                           walk=walk, mass_target=mass_target)
