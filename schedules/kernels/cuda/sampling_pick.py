"""Sampling, stage two: one block a row combines what stage one found and, where top_k, top_p or min_p is set, bounds how far
a kept logit can lie from the maximum, collects the candidates within that distance and ranks them; more candidates than
fit are narrowed by a radix search over the distance first. Counts and probability masses are integers, so the answer
does not depend on the order of atomics.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import SamplingSpec, counts_width
from relaxpack.schedules.kernels.cuda.fragments import (
    AWAIT,
    EXP2,
    FULL_MASK,
    LOG2_E,
    RELEASE,
    shuffle,
    shuffle_up,
    shuffle_xor,
)
from relaxpack.schedules.kernels.cuda.sampling_parts import (
    COUNTS_ROW,
    MIN_P,
    POSITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    sampling_parts,
)
from relaxpack.schedules.kernels.cuda.sampling_scan import TOPS, scan_blocks
from tvm.script import tirx as T

THREADS, VECTORS = 512, 4                    # 8192 logits a round
BINS, CANDIDATES = 2048, 8192
KEY_BITS, KEY_SCALE = 31, float(1 << 26)     # key = distance * 2^26, distance < 32
DISTANCE_LIMIT = 31.999
MASS_BITS, MASS_HALF = 28, 14                # mass = e^-distance * 2^28; sums of its halves fit 32 bits (V < 2^18)


def deviation(item_key: Any, centre: Any) -> Any:
    return T.Cast("uint32", T.max(T.Cast("int32", item_key) - centre, centre - T.Cast("int32", item_key)))


def sample_pick_function(spec: SamplingSpec, early: bool) -> Any:
    V, MASKED = spec.vocab_size, spec.constrained
    WORDS, BLOCKS = -(-V // 32), scan_blocks(spec.vocab_size)
    WIDTH = counts_width(V)
    WARPS, PER, MAXIMA = THREADS // 32, BINS // THREADS, BLOCKS * TOPS
    parts = sampling_parts(spec)
    philox, gumbel, load4, load_counts4 = parts.philox, parts.gumbel, parts.load4, parts.load_counts4
    adjust, better, combine_sums, filtered = parts.adjust, parts.better, parts.combine_sums, parts.filtered
    find_stale = parts.find_stale

    @T.inline
    def pick(logits, settings, counters, counts, allowed, sums, picks, tops, drawn, row, tx):
        pool = T.SMEMPool()
        bin_count = pool.alloc((BINS,), "uint32", align=16)
        bin_low = pool.alloc((BINS,), "uint32", align=16)            # mass, low and high words
        bin_high = pool.alloc((BINS,), "uint32", align=16)
        list_key = pool.alloc((CANDIDATES,), "uint32", align=16)
        list_token = pool.alloc((CANDIDATES,), "int32", align=16)
        maxima = pool.alloc((MAXIMA,), "float32", align=16)
        warp_mass = pool.alloc((WARPS,), "uint64", align=16)
        warp_moment = pool.alloc((WARPS,), "uint64", align=16)
        found_mass = pool.alloc((2,), "uint64", align=16)            # before the bin found, and its own
        warp_count = pool.alloc((WARPS,), "int32", align=16)
        found = pool.alloc((4,), "int32", align=16)                  # bin, count before, own count, list length
        shared_f = pool.alloc((max(WARPS, 4),), "float32", align=16)
        shared_i = pool.alloc((max(WARPS, 4),), "int32", align=16)
        pool.commit()
        lane = T.meta_var(tx % 32)
        warp = T.meta_var(tx // 32)
        x = T.alloc_buffer((4 * VECTORS,), "float32", scope="local")
        seen = T.alloc_buffer((4 * VECTORS,), "int32", scope="local")
        ahead = T.alloc_buffer((4 * VECTORS,), "float32", scope="local")
        seen_ahead = T.alloc_buffer((4 * VECTORS,), "int32", scope="local")
        word = T.alloc_buffer((4,), "uint32", scope="local")
        key = T.alloc_buffer((6,), "uint32", scope="local")
        own_count = T.alloc_buffer((PER,), "int32", scope="local")
        own_mass = T.alloc_buffer((PER,), "uint64", scope="local")
        peak: T.float32
        total: T.float32
        best: T.float32
        best_token: T.int32
        score: T.float32
        score_token: T.int32
        norm: T.float32                       # sum of e^-distance over the row
        bad: T.int32
        token: T.int32
        keep: T.int32
        votes: T.uint32
        value: T.float32
        distance: T.float32
        reach: T.float32                      # no kept token is farther from the maximum (a little more than `cut`)
        noise: T.float32
        scale: T.float32
        counts_row: T.int32
        stale: T.int32
        other: T.int32
        index: T.int32
        base: T.int32
        item_key: T.uint32
        cut: T.uint32                         # largest key kept
        mass: T.uint32
        old: T.uint32                         # one random word
        shift: T.uint32
        bin_mask: T.uint32
        prefix_shift: T.uint32
        prefix: T.uint32
        from_list: T.int32
        items: T.int32
        need_k: T.int32
        need_p: T.int32
        need_t: T.int32
        by_mass: T.int32
        step: T.int32
        level: T.int32
        sum_count: T.int32
        sum_mass: T.uint64
        before_count: T.int32
        before_mass: T.uint64
        all_count: T.int32
        all_mass: T.uint64
        kept_mass: T.uint64
        passed_mass: T.uint64
        min_cut: T.uint32
        typical_cut: T.uint32                 # largest deviation from the mean distance kept
        centre: T.int32                       # mean distance, as a key
        target: T.uint64
        passed: T.uint64
        amount: T.uint64

        @T.inline
        def weigh():
            T.ptx[EXP2](noise, distance * T.float32(-LOG2_E))
            mass = T.Cast("uint32", noise * T.float32(1 << MASS_BITS) + T.float32(0.5))

        @T.inline
        def add_moments():
            # of the distance, in integers: their sums do not depend on an order
            weigh()
            sum_mass = sum_mass + T.Cast("uint64", mass)
            passed = passed + T.Cast("uint64", noise * distance * T.float32(1 << MASS_BITS) + T.float32(0.5))

        @T.inline
        def find_centre():
            # the mean distance: a token's surprise is it plus a constant, so entropy and surprise differ as distances do
            for i in T.unroll(5):
                sum_mass = sum_mass + shuffle_xor(sum_mass, 1 << i)
                passed = passed + shuffle_xor(passed, 1 << i)
            T.cuda.cta_sync()
            if lane == 0:
                warp_mass[warp] = sum_mass
                warp_moment[warp] = passed
            T.cuda.cta_sync()
            all_mass = T.uint64(0)
            amount = T.uint64(0)
            for w in T.unroll(WARPS):
                all_mass = all_mass + warp_mass[w]
                amount = amount + warp_moment[w]
            centre = T.Cast("int32", T.Cast("float64", amount) / T.Cast("float64", all_mass) * T.float64(KEY_SCALE))
            T.cuda.cta_sync()

        @T.inline
        def visit(kind):
            # one token within reach: item_key, distance and index are set
            if kind == "histogram":
                if item_key <= cut:
                    if step == 2:
                        item_key = deviation(item_key, centre)
                    if level < 0:
                        add_moments()
                    elif (item_key >> prefix_shift) == prefix:
                        weigh()
                        other = T.Cast("int32", (item_key >> shift) & bin_mask)
                        T.cuda.atomic_add(bin_count.ptr_to([other]), T.uint32(1))
                        T.cuda.atomic_add(bin_low.ptr_to([other]), mass & T.uint32((1 << MASS_HALF) - 1))
                        T.cuda.atomic_add(bin_high.ptr_to([other]), mass >> T.uint32(MASS_HALF))
            elif T.And(item_key <= cut, deviation(item_key, centre) <= typical_cut):
                philox(word, key, index, counters[row, POSITION], counters[row, SEED_LOW], counters[row, SEED_HIGH])
                old = T.if_then_else(index % 4 < 2, T.if_then_else(index % 4 == 0, word[0], word[1]),
                                     T.if_then_else(index % 4 == 2, word[2], word[3]))
                gumbel(noise, old)
                better(score, score_token, noise - distance, index)

        @T.inline
        def sweep(kind):
            # the next round's logits are on their way while this round's are looked at
            for j in T.unroll(VECTORS):
                load4(ahead, logits, row, (j * THREADS + tx) * 4, j * 4)
            for j in T.unroll(VECTORS):
                load_counts4(seen_ahead, counts, counts_row, (j * THREADS + tx) * 4, j * 4)
            base = 0
            while base < V:
                for i in T.unroll(4 * VECTORS):
                    x[i] = ahead[i]
                    seen[i] = seen_ahead[i]
                for j in T.unroll(VECTORS):
                    load4(ahead, logits, row, base + ((VECTORS + j) * THREADS + tx) * 4, j * 4)
                for j in T.unroll(VECTORS):
                    load_counts4(seen_ahead, counts, counts_row, base + ((VECTORS + j) * THREADS + tx) * 4, j * 4)
                value = T.float32("-inf")
                for j in T.unroll(VECTORS):
                    for i in T.unroll(4):
                        distance = x[j * 4 + i]
                        if MASKED or counts_row >= 0:
                            adjust(distance, seen[j * 4 + i], base + (j * THREADS + tx) * 4 + i, row, settings, counters,
                                   counts, counts_row, stale, allowed, scale)
                        else:
                            distance = distance * scale
                        x[j * 4 + i] = distance
                        value = T.max(value, distance)
                # most rounds have no candidate in the whole warp
                if T.cuda.ballot_sync(T.uint32(FULL_MASK), T.Cast("int32", best - value <= reach)) != T.uint32(0):
                    for j in T.unroll(VECTORS):
                        for i in T.unroll(4):
                            index = base + (j * THREADS + tx) * 4 + i
                            distance = best - x[j * 4 + i]
                            keep = 0
                            if distance < T.float32(DISTANCE_LIMIT):
                                item_key = T.Cast("uint32", distance * T.float32(KEY_SCALE))
                                if kind == "gather":
                                    keep = T.if_then_else(item_key <= cut, 1, 0)
                                else:
                                    visit(kind)
                            if kind == "gather":
                                votes = T.cuda.ballot_sync(T.uint32(FULL_MASK), keep)
                                if votes != T.uint32(0):
                                    if lane == 0:
                                        other = T.cuda.atomic_add(found.ptr_to([3]), T.Cast("int32", T.popcount(votes)))
                                    other = shuffle(other, 0) + T.Cast("int32", T.popcount(
                                        votes & ((T.uint32(1) << T.Cast("uint32", lane)) - T.uint32(1))))
                                    if T.And(keep == 1, other < CANDIDATES):
                                        list_key[other] = item_key
                                        list_token[other] = index
                base = base + THREADS * VECTORS * 4

        @T.inline
        def gather():
            # candidates with a key up to `cut` → the list; `items` counts them, also those that did not fit
            sweep("gather")
            T.cuda.cta_sync()
            items = found[3]
            from_list = T.if_then_else(items <= CANDIDATES, 1, 0)
            T.cuda.cta_sync()

        @T.inline
        def walk(kind):
            # over the candidate list if there is one, else over the row
            if from_list == 1:
                base = tx
                while base < items:
                    item_key = list_key[base]
                    index = list_token[base]
                    distance = T.Cast("float32", item_key) * T.float32(1.0 / KEY_SCALE)
                    visit(kind)
                    base = base + THREADS
            else:
                sweep(kind)

        @T.inline
        def histogram():
            for i in T.unroll(PER):
                bin_count[tx * PER + i] = T.uint32(0)
                bin_low[tx * PER + i] = T.uint32(0)
                bin_high[tx * PER + i] = T.uint32(0)
            T.cuda.cta_sync()
            walk("histogram")
            T.cuda.cta_sync()

        @T.inline
        def start_level(which):
            # 11 bits, then 10 and 10: `prefix` are the bits above
            shift = T.Cast("uint32", 20 - 10 * which)
            bin_mask = T.if_then_else(which == 0, T.uint32(BINS - 1), T.uint32(1023))
            prefix_shift = T.if_then_else(which == 0, T.uint32(KEY_BITS), T.Cast("uint32", 30 - 10 * which))

        @T.inline
        def sum_bins():
            # before_*: what lies in the bins before this thread's; all_*: everything
            sum_count = 0
            sum_mass = T.uint64(0)
            for i in T.unroll(PER):
                own_count[i] = T.Cast("int32", bin_count[tx * PER + i])
                own_mass[i] = (T.Cast("uint64", bin_high[tx * PER + i]) << T.uint64(MASS_HALF)) + T.Cast(
                    "uint64", bin_low[tx * PER + i])
                sum_count = sum_count + own_count[i]
                sum_mass = sum_mass + own_mass[i]
            before_count = sum_count
            before_mass = sum_mass
            scan_lanes()
            before_count = sum_count - before_count
            before_mass = sum_mass - before_mass
            if lane == 31:
                warp_count[warp] = sum_count
                warp_mass[warp] = sum_mass
            T.cuda.cta_sync()
            sum_count = 0
            sum_mass = T.uint64(0)
            if lane < WARPS:
                sum_count = warp_count[lane]
                sum_mass = warp_mass[lane]
            scan_lanes()
            all_count = shuffle(sum_count, 31)
            all_mass = shuffle(sum_mass, 31)
            other = shuffle_up(sum_count, 1)
            amount = shuffle_up(sum_mass, 1)
            if lane == 0:
                other = 0
                amount = T.uint64(0)
            before_count = before_count + shuffle(other, warp)
            before_mass = before_mass + shuffle(amount, warp)

        @T.inline
        def scan_lanes():
            for i in T.unroll(5):
                other = shuffle_up(sum_count, 1 << i)
                amount = shuffle_up(sum_mass, 1 << i)
                if lane >= (1 << i):
                    sum_count = sum_count + other
                    sum_mass = sum_mass + amount

        @T.inline
        def select():
            # the first bin at whose end `target` (count or mass) is reached
            for i in T.unroll(PER):
                passed = T.if_then_else(by_mass == 1, before_mass, T.Cast("uint64", before_count))
                amount = T.if_then_else(by_mass == 1, own_mass[i], T.Cast("uint64", own_count[i]))
                if T.And(passed < target, target <= passed + amount):
                    found[0] = tx * PER + i
                    found[1] = before_count
                    found[2] = own_count[i]
                    found_mass[0] = before_mass
                    found_mass[1] = own_mass[i]
                before_count = before_count + own_count[i]
                before_mass = before_mass + own_mass[i]
            T.cuda.cta_sync()

        @T.inline
        def mass_target(of, share):
            target = T.Cast("uint64", T.ceil(T.Cast("float64", settings[row, share]) * T.Cast("float64", of)))
            target = T.max(T.min(target, of), T.uint64(1))

        if early:
            T.ptx[AWAIT]()
            T.ptx[RELEASE]()
        # (a) what stage one found, combined by warp 0 in a fixed order
        if warp == 0:
            peak = T.float32("-inf")
            total = T.float32(0)
            best = T.float32("-inf")
            best_token = V
            score = T.float32("-inf")
            score_token = V
            bad = 0
            value = T.float32("-inf")
            norm = T.float32(0)
            index = lane
            while index < BLOCKS:
                combine_sums(peak, total, sums[row, index, 0], sums[row, index, 1])
                combine_sums(value, norm, sums[row, index, 2], sums[row, index, 4])
                better(best, best_token, sums[row, index, 2], picks[row, index, 0])
                better(score, score_token, sums[row, index, 3], picks[row, index, 1])
                bad = bad | picks[row, index, 2]
                index = index + 32
            for i in T.unroll(5):
                distance = shuffle_xor(value, 1 << i)
                noise = shuffle_xor(norm, 1 << i)
                combine_sums(value, norm, distance, noise)
                distance = shuffle_xor(peak, 1 << i)
                noise = shuffle_xor(total, 1 << i)
                combine_sums(peak, total, distance, noise)
                distance = shuffle_xor(best, 1 << i)
                other = shuffle_xor(best_token, 1 << i)
                better(best, best_token, distance, other)
                distance = shuffle_xor(score, 1 << i)
                other = shuffle_xor(score_token, 1 << i)
                better(score, score_token, distance, other)
                bad = bad | shuffle_xor(bad, 1 << i)
            if lane == 0:
                shared_f[3] = norm
                shared_f[0] = peak
                shared_f[1] = total
                shared_f[2] = best
                shared_i[0] = best_token
                shared_i[1] = score_token
                shared_i[2] = T.if_then_else(T.Or(bad != 0, peak == T.float32("-inf")), 1,
                                             T.if_then_else(best == T.float32("-inf"), 2, 0))
                found[3] = 0
        T.cuda.cta_sync()
        peak = shared_f[0]
        total = shared_f[1]
        best = shared_f[2]
        best_token = shared_i[0]
        token = shared_i[1]
        bad = shared_i[2]
        counts_row = counters[row, COUNTS_ROW]
        find_stale(stale, counts, counts_row, counters, row)
        scale = T.float32(1)
        # (b) rows with a filter
        if settings[row, TEMPERATURE] <= T.float32(0):
            token = best_token
        elif T.And(bad == 0, filtered(settings, counters, row)):
            scale = T.float32(1) / settings[row, TEMPERATURE]
            norm = shared_f[3]
            from_list = 0
            items = 0
            need_k = T.if_then_else(T.And(counters[row, TOP_K] > 0, counters[row, TOP_K] < V), 1, 0)
            need_p = T.if_then_else(settings[row, TOP_P] < T.float32(1), 1, 0)
            need_t = T.if_then_else(settings[row, TYPICAL_P] < T.float32(1), 1, 0)
            kept_mass = T.Cast("uint64", norm * T.float32(1 << MASS_BITS))
            typical_cut = T.uint32(FULL_MASK)
            centre = 0
            step = 0
            level = 0
            # how far from the maximum a kept token can be
            distance = T.float32(DISTANCE_LIMIT)
            if T.And(need_k == 1, counters[row, TOP_K] <= MAXIMA):
                # at least top_k tokens reach the top_k-th largest of the partial maxima
                index = tx
                while index < MAXIMA:
                    maxima[index] = tops[row, index]
                    index = index + THREADS
                T.cuda.cta_sync()
                index = tx
                while index < MAXIMA:
                    value = maxima[index]
                    other = 0
                    for j in T.serial(MAXIMA // 16):
                        for i in T.unroll(16):
                            other = other + T.Cast("int32", T.Or(maxima[j * 16 + i] > value, T.And(
                                maxima[j * 16 + i] == value, j * 16 + i < index)))
                    if other == counters[row, TOP_K] - 1:
                        shared_f[3] = value
                    index = index + THREADS
                T.cuda.cta_sync()
                distance = T.min(distance, best - shared_f[3])
            elif T.And(need_k == 0, need_p == 1):
                # all tokens beyond this distance together hold less than 1 - top_p
                value = T.max(T.float32(1) - settings[row, TOP_P], T.float32(1e-7)) * norm
                distance = T.min(distance, T.log(T.float32(V) / value) + T.float32(0.01))
            elif need_k == 0:
                distance = T.min(distance, T.max(-T.log(settings[row, MIN_P]), T.float32(0)))
            reach = T.max(distance, T.float32(0)) + T.float32(1e-5)
            cut = T.Cast("uint32", T.max(distance, T.float32(0)) * T.float32(KEY_SCALE))
            min_cut = T.uint32((1 << KEY_BITS) - 1)
            if settings[row, MIN_P] > T.float32(0):
                distance = T.min(T.max(-T.log(settings[row, MIN_P]), T.float32(0)), T.float32(DISTANCE_LIMIT))
                min_cut = T.Cast("uint32", distance * T.float32(KEY_SCALE))
            gather()
            score = T.float32("-inf")
            score_token = V
            if items <= THREADS:
                # (b1) few candidates: one per thread, ranked against all others
                item_key = T.uint32(FULL_MASK)
                index = V
                mass = T.uint32(0)
                if tx < items:
                    item_key = list_key[tx]
                    index = list_token[tx]
                    distance = T.Cast("float32", item_key) * T.float32(1.0 / KEY_SCALE)
                    weigh()
                bin_low[tx] = mass
                T.cuda.cta_sync()
                before_count = 0
                before_mass = T.uint64(0)
                for i in T.serial(items):
                    if list_key[i] < item_key:
                        before_count = before_count + 1
                        before_mass = before_mass + T.Cast("uint64", bin_low[i])
                keep = T.if_then_else(T.And(tx < items, T.Or(need_k == 0, before_count < counters[row, TOP_K])), 1, 0)
                if T.And(need_k == 1, need_p == 1):
                    sum_mass = T.if_then_else(keep == 1, T.Cast("uint64", mass), T.uint64(0))
                    for i in T.unroll(5):
                        sum_mass = sum_mass + shuffle_xor(sum_mass, 1 << i)
                    if lane == 0:
                        warp_mass[warp] = sum_mass
                    T.cuda.cta_sync()
                    kept_mass = T.uint64(0)
                    for w in T.unroll(WARPS):
                        kept_mass = kept_mass + warp_mass[w]
                mass_target(kept_mass, TOP_P)
                if T.And(need_p == 1, before_mass >= target):
                    keep = 0
                if item_key > min_cut:
                    keep = 0
                if need_t == 1:
                    sum_mass = T.uint64(0)
                    passed = T.uint64(0)
                    if keep == 1:
                        add_moments()
                    find_centre()
                    old = T.if_then_else(keep == 1, deviation(item_key, centre), T.uint32(FULL_MASK))
                    bin_count[tx] = old
                    T.cuda.cta_sync()
                    before_mass = T.uint64(0)
                    for i in T.serial(items):
                        if bin_count[i] < old:
                            before_mass = before_mass + T.Cast("uint64", bin_low[i])
                    mass_target(all_mass, TYPICAL_P)
                    if before_mass >= target:
                        keep = 0
                if keep == 1:
                    cut = item_key
                    visit("draw")
            else:
                # (b2) many: a radix search finds the largest key kept
                if T.And(from_list == 0, T.Or(need_k == 1, need_p == 1)):
                    by_mass = 1 - need_k
                    start_level(0)
                    prefix = T.uint32(0)
                    histogram()
                    sum_bins()
                    if need_k == 1:
                        target = T.Cast("uint64", T.min(counters[row, TOP_K], all_count))
                    else:
                        mass_target(kept_mass, TOP_P)
                        target = T.min(target, all_mass)
                    select()
                    cut = T.min(cut, (T.Cast("uint32", found[0] + 1) << T.uint32(20)) - T.uint32(1))
                    other = found[1] + found[2]
                    T.cuda.cta_sync()
                    if other <= CANDIDATES:
                        if tx == 0:
                            found[3] = 0
                        T.cuda.cta_sync()
                        gather()
                while step < 3:
                    if T.if_then_else(step == 0, need_k, T.if_then_else(step == 1, need_p, need_t)) == 1:
                        by_mass = T.min(step, 1)
                        prefix = T.uint32(0)
                        level = 0
                        passed_mass = T.uint64(0)
                        if step == 2:
                            cut = T.min(cut, min_cut)
                            level = -1
                        while level < 3:
                            start_level(T.max(level, 0))
                            sum_mass = T.uint64(0)
                            passed = T.uint64(0)
                            histogram()
                            if level < 0:
                                find_centre()
                            else:
                                sum_bins()
                                if level == 0:
                                    if step == 0:
                                        target = T.Cast("uint64", T.min(counters[row, TOP_K], all_count))
                                    elif step == 1:
                                        mass_target(kept_mass, TOP_P)
                                    else:
                                        mass_target(all_mass, TYPICAL_P)
                                    if by_mass == 1:
                                        target = T.min(target, all_mass)
                                select()
                                target = target - T.if_then_else(by_mass == 1, found_mass[0], T.Cast("uint64", found[1]))
                                passed_mass = passed_mass + found_mass[0]
                                prefix = (prefix << T.uint32(10)) | T.Cast("uint32", found[0])
                            level = level + 1
                        kept_mass = passed_mass + found_mass[1]
                        if step == 2:
                            typical_cut = prefix
                        else:
                            cut = prefix
                    step = step + 1
                cut = T.min(cut, min_cut)
                walk("draw")
            for i in T.unroll(5):
                value = shuffle_xor(score, 1 << i)
                other = shuffle_xor(score_token, 1 << i)
                better(score, score_token, value, other)
            T.cuda.cta_sync()
            if lane == 0:
                shared_f[warp] = score
                shared_i[warp] = score_token
            T.cuda.cta_sync()
            for w in T.unroll(WARPS):
                better(score, score_token, shared_f[w], shared_i[w])
            token = score_token
        # (c) the answer
        if tx == 0:
            if bad != 0:
                drawn[row, 0] = -bad
                drawn[row, 1] = 0x7FC00000
            else:
                drawn[row, 0] = token
                drawn[row, 1] = T.reinterpret("int32", logits[row, token] - peak - T.log(total))
                if counts_row >= 0:
                    if stale >= 0:
                        counts[counts_row, stale] = counts[counts_row, stale] - 1
                    counts[counts_row, token] = counts[counts_row, token] + 1
                    counts[counts_row, V] = token
                    counts[counts_row, V + 1] = counters[row, POSITION]

    if MASKED:
        @T.prim_func
        def sample_pick(logits_h: T.handle, settings_h: T.handle, counters_h: T.handle, counts_h: T.handle,
                        allowed_h: T.handle, sums_h: T.handle, picks_h: T.handle, tops_h: T.handle, drawn_h: T.handle):
            b = T.int64()
            c = T.int64()
            d = T.int64()
            m = T.int64()
            logits = T.match_buffer(logits_h, (b, V), "float32", align=16)
            settings = T.match_buffer(settings_h, (b, 8), "float32")
            counters = T.match_buffer(counters_h, (b, 8), "int32")
            counts = T.match_buffer(counts_h, (c, WIDTH), "int32", align=16)
            allowed = T.match_buffer(allowed_h, (m, WORDS), "int32")
            sums = T.match_buffer(sums_h, (b, BLOCKS, 5), "float32")
            picks = T.match_buffer(picks_h, (b, BLOCKS, 3), "int32")
            tops = T.match_buffer(tops_h, (b, MAXIMA), "float32")
            drawn = T.match_buffer(drawn_h, (d, 2), "int32")
            T.device_entry()
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            row = T.cta_id([T.Cast("int32", b)])
            tx = T.thread_id([THREADS])
            pick(logits, settings, counters, counts, allowed, sums, picks, tops, drawn, row, tx)
    else:
        @T.prim_func
        def sample_pick(logits_h: T.handle, settings_h: T.handle, counters_h: T.handle, counts_h: T.handle,
                        sums_h: T.handle, picks_h: T.handle, tops_h: T.handle, drawn_h: T.handle):
            b = T.int64()
            c = T.int64()
            d = T.int64()
            logits = T.match_buffer(logits_h, (b, V), "float32", align=16)
            settings = T.match_buffer(settings_h, (b, 8), "float32")
            counters = T.match_buffer(counters_h, (b, 8), "int32")
            counts = T.match_buffer(counts_h, (c, WIDTH), "int32", align=16)
            sums = T.match_buffer(sums_h, (b, BLOCKS, 5), "float32")
            picks = T.match_buffer(picks_h, (b, BLOCKS, 3), "int32")
            tops = T.match_buffer(tops_h, (b, MAXIMA), "float32")
            drawn = T.match_buffer(drawn_h, (d, 2), "int32")
            T.device_entry()
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            row = T.cta_id([T.Cast("int32", b)])
            tx = T.thread_id([THREADS])
            pick(logits, settings, counters, counts, None, sums, picks, tops, drawn, row, tx)
    return sample_pick
