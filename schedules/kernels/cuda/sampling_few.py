"""Stage two of sampling for few candidates: one per thread, ranked against all others."""

from __future__ import annotations

from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import SamplingSpec
from relaxpack.schedules.kernels.cuda.fragments import FULL_MASK, shuffle_xor
from relaxpack.schedules.kernels.cuda.sampling_parts import TOP_K, TOP_P, TYPICAL_P
from relaxpack.schedules.kernels.cuda.sampling_state import KEY_SCALE, WARPS
from relaxpack.schedules.kernels.cuda.sampling_tokens import deviation, token_parts
from tvm.script import tirx as T


def draw_from_few(spec: SamplingSpec) -> Any:
    """Inline over a `pick_state` whose list holds all candidates, no more than there are threads: draws from those kept."""
    V = spec.vocab_size
    parts = token_parts(spec)
    weigh, add_moments, find_centre, visit, mass_target = (
        parts.weigh, parts.add_moments, parts.find_centre, parts.visit, parts.mass_target)

    @T.inline
    def draw(s):
        s.item_key = T.uint32(FULL_MASK)
        s.index = V
        s.mass = T.uint32(0)
        if s.tx < s.items:
            s.item_key = s.list_key[s.tx]
            s.index = s.list_token[s.tx]
            s.distance = T.Cast("float32", s.item_key) * T.float32(1.0 / KEY_SCALE)
            weigh(s)
        s.bin_low[s.tx] = s.mass
        T.cuda.cta_sync()
        s.before_count = 0
        s.before_mass = T.uint64(0)
        for i in T.serial(s.items):
            if s.list_key[i] < s.item_key:
                s.before_count = s.before_count + 1
                s.before_mass = s.before_mass + T.Cast("uint64", s.bin_low[i])
        s.keep = T.if_then_else(T.And(s.tx < s.items, T.Or(s.need_k == 0, s.before_count < s.counters[s.row, TOP_K])), 1, 0)
        if T.And(s.need_k == 1, s.need_p == 1):
            s.sum_mass = T.if_then_else(s.keep == 1, T.Cast("uint64", s.mass), T.uint64(0))
            for i in T.unroll(5):
                s.sum_mass = s.sum_mass + shuffle_xor(s.sum_mass, 1 << i)
            if s.lane == 0:
                s.warp_mass[s.warp] = s.sum_mass
            T.cuda.cta_sync()
            s.kept_mass = T.uint64(0)
            for w in T.unroll(WARPS):
                s.kept_mass = s.kept_mass + s.warp_mass[w]
        mass_target(s, s.kept_mass, TOP_P)
        if T.And(s.need_p == 1, s.before_mass >= s.target):
            s.keep = 0
        if s.item_key > s.min_cut:
            s.keep = 0
        if s.need_t == 1:
            s.sum_mass = T.uint64(0)
            s.passed = T.uint64(0)
            if s.keep == 1:
                add_moments(s)
            find_centre(s)
            s.old = T.if_then_else(s.keep == 1, deviation(s.item_key, s.centre), T.uint32(FULL_MASK))
            s.bin_count[s.tx] = s.old
            T.cuda.cta_sync()
            s.before_mass = T.uint64(0)
            for i in T.serial(s.items):
                if s.bin_count[i] < s.old:
                    s.before_mass = s.before_mass + T.Cast("uint64", s.bin_low[i])
            mass_target(s, s.all_mass, TYPICAL_P)
            if s.before_mass >= s.target:
                s.keep = 0
        if s.keep == 1:
            s.cut = s.item_key
            visit(s, "draw")

    return draw
