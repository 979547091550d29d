"""Stage two of sampling for many candidates: a radix search over distance keys finds the largest one kept. Each level fills
2048 bins with counts and masses and takes the bin in which top_k, or a share of the mass, is reached.
"""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import SamplingSpec
from relaxpack.schedules.kernels.cuda.fragments import shuffle, shuffle_up
from relaxpack.schedules.kernels.cuda.sampling_parts import TOP_K, TOP_P, TYPICAL_P
from relaxpack.schedules.kernels.cuda.sampling_state import BINS, CANDIDATES, KEY_BITS, MASS_HALF, PER, WARPS
from relaxpack.schedules.kernels.cuda.sampling_tokens import token_parts
from tvm.script import tirx as T


def draw_from_many(spec: SamplingSpec) -> Any:
    """Inline over a `pick_state`: finds what is kept and draws from it."""
    parts = token_parts(spec)
    find_centre, gather, walk, mass_target = parts.find_centre, parts.gather, parts.walk, parts.mass_target

    @T.inline
    def histogram(s):
        for i in T.unroll(PER):
            s.bin_count[s.tx * PER + i] = T.uint32(0)
            s.bin_low[s.tx * PER + i] = T.uint32(0)
            s.bin_high[s.tx * PER + i] = T.uint32(0)
        T.cuda.cta_sync()
        walk(s, "histogram")
        T.cuda.cta_sync()

    @T.inline
    def start_level(s, which):
        # 11 bits, then 10 and 10: `prefix` are the bits above
        s.shift = T.Cast("uint32", 20 - 10 * which)
        s.bin_mask = T.if_then_else(which == 0, T.uint32(BINS - 1), T.uint32(1023))
        s.prefix_shift = T.if_then_else(which == 0, T.uint32(KEY_BITS), T.Cast("uint32", 30 - 10 * which))

    @T.inline
    def scan_lanes(s):
        for i in T.unroll(5):
            s.other = shuffle_up(s.sum_count, 1 << i)
            s.amount = shuffle_up(s.sum_mass, 1 << i)
            if s.lane >= (1 << i):
                s.sum_count = s.sum_count + s.other
                s.sum_mass = s.sum_mass + s.amount

    @T.inline
    def sum_bins(s):
        # before_*: what lies in the bins before this thread's; all_*: everything
        s.sum_count = 0
        s.sum_mass = T.uint64(0)
        for i in T.unroll(PER):
            s.own_count[i] = T.Cast("int32", s.bin_count[s.tx * PER + i])
            s.own_mass[i] = (T.Cast("uint64", s.bin_high[s.tx * PER + i]) << T.uint64(MASS_HALF)) + T.Cast(
                "uint64", s.bin_low[s.tx * PER + i])
            s.sum_count = s.sum_count + s.own_count[i]
            s.sum_mass = s.sum_mass + s.own_mass[i]
        s.before_count = s.sum_count
        s.before_mass = s.sum_mass
        scan_lanes(s)
        s.before_count = s.sum_count - s.before_count
        s.before_mass = s.sum_mass - s.before_mass
        if s.lane == 31:
            s.warp_count[s.warp] = s.sum_count
            s.warp_mass[s.warp] = s.sum_mass
        T.cuda.cta_sync()
        s.sum_count = 0
        s.sum_mass = T.uint64(0)
        if s.lane < WARPS:
            s.sum_count = s.warp_count[s.lane]
            s.sum_mass = s.warp_mass[s.lane]
        scan_lanes(s)
        s.all_count = shuffle(s.sum_count, 31)
        s.all_mass = shuffle(s.sum_mass, 31)
        s.other = shuffle_up(s.sum_count, 1)
        s.amount = shuffle_up(s.sum_mass, 1)
        if s.lane == 0:
            s.other = 0
            s.amount = T.uint64(0)
        s.before_count = s.before_count + shuffle(s.other, s.warp)
        s.before_mass = s.before_mass + shuffle(s.amount, s.warp)

    @T.inline
    def select(s):
        # the first bin at whose end `target` (count or mass) is reached
        for i in T.unroll(PER):
            s.passed = T.if_then_else(s.by_mass == 1, s.before_mass, T.Cast("uint64", s.before_count))
            s.amount = T.if_then_else(s.by_mass == 1, s.own_mass[i], T.Cast("uint64", s.own_count[i]))
            if T.And(s.passed < s.target, s.target <= s.passed + s.amount):
                s.found[0] = s.tx * PER + i
                s.found[1] = s.before_count
                s.found[2] = s.own_count[i]
                s.found_mass[0] = s.before_mass
                s.found_mass[1] = s.own_mass[i]
            s.before_count = s.before_count + s.own_count[i]
            s.before_mass = s.before_mass + s.own_mass[i]
        T.cuda.cta_sync()

    @T.inline
    def narrow(s):
        # one level over the whole row, after which what is left may fit the list
        if T.And(s.from_list == 0, T.Or(s.need_k == 1, s.need_p == 1)):
            s.by_mass = 1 - s.need_k
            start_level(s, 0)
            s.prefix = T.uint32(0)
            histogram(s)
            sum_bins(s)
            if s.need_k == 1:
                s.target = T.Cast("uint64", T.min(s.counters[s.row, TOP_K], s.all_count))
            else:
                mass_target(s, s.kept_mass, TOP_P)
                s.target = T.min(s.target, s.all_mass)
            select(s)
            s.cut = T.min(s.cut, (T.Cast("uint32", s.found[0] + 1) << T.uint32(20)) - T.uint32(1))
            s.other = s.found[1] + s.found[2]
            T.cuda.cta_sync()
            if s.other <= CANDIDATES:
                if s.tx == 0:
                    s.found[3] = 0
                T.cuda.cta_sync()
                gather(s)

    @T.inline
    def find_cuts(s):
        # top_k, top_p and typical_p in this order, each within what the one before kept
        while s.step < 3:
            if T.if_then_else(s.step == 0, s.need_k, T.if_then_else(s.step == 1, s.need_p, s.need_t)) == 1:
                s.by_mass = T.min(s.step, 1)
                s.prefix = T.uint32(0)
                s.level = 0
                s.passed_mass = T.uint64(0)
                if s.step == 2:
                    s.cut = T.min(s.cut, s.min_cut)
                    s.level = -1
                while s.level < 3:
                    start_level(s, T.max(s.level, 0))
                    s.sum_mass = T.uint64(0)
                    s.passed = T.uint64(0)
                    histogram(s)
                    if s.level < 0:
                        find_centre(s)
                    else:
                        sum_bins(s)
                        if s.level == 0:
                            if s.step == 0:
                                s.target = T.Cast("uint64", T.min(s.counters[s.row, TOP_K], s.all_count))
                            elif s.step == 1:
                                mass_target(s, s.kept_mass, TOP_P)
                            else:
                                mass_target(s, s.all_mass, TYPICAL_P)
                            if s.by_mass == 1:
                                s.target = T.min(s.target, s.all_mass)
                        select(s)
                        s.target = s.target - T.if_then_else(s.by_mass == 1, s.found_mass[0], T.Cast("uint64", s.found[1]))
                        s.passed_mass = s.passed_mass + s.found_mass[0]
                        s.prefix = (s.prefix << T.uint32(10)) | T.Cast("uint32", s.found[0])
                    s.level = s.level + 1
                s.kept_mass = s.passed_mass + s.found_mass[1]
                if s.step == 2:
                    s.typical_cut = s.prefix
                else:
                    s.cut = s.prefix
            s.step = s.step + 1

    @T.inline
    def draw(s):
        narrow(s)
        find_cuts(s)
        s.cut = T.min(s.cut, s.min_cut)
        walk(s, "draw")

    return draw
