"""What both stages of sampling do with a logit: load, penalties, bias, mask and temperature, comparison, noise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import (
    COUNT_BITS,
    EDIT_BITS,
    IN_PROMPT,
    SAMPLING_COUNTERS,
    SAMPLING_SETTINGS,
    SamplingSpec,
)
from tvm.script import tirx as T

COUNT_MASK = (1 << COUNT_BITS) - 1
EDIT_MASK = (1 << EDIT_BITS) - 1
PHILOX = (0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85)
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, TYPICAL_P = range(len(SAMPLING_SETTINGS))
TOP_K, SEED_LOW, SEED_HIGH, POSITION, COUNTS_ROW, MASK_ROW, TOPS = range(len(SAMPLING_COUNTERS))


def sampling_parts(spec: SamplingSpec, fresh: bool = False) -> SimpleNamespace:
    """Script functions for this vocabulary, by name. `fresh`: the logits were written by other blocks of the same kernel, so
    they are read from L2."""
    LOAD = "ld.global.cg" if fresh else "ld.global.nc"
    V, MASKED, WIDE = spec.vocab_size, spec.constrained, spec.vocab_size % 4 == 0

    @T.inline
    def philox(word, key, first, position, seed_low, seed_high):
        word[0] = T.Cast("uint32", first >> 2)
        word[1] = T.Cast("uint32", position)
        word[2] = T.uint32(0)
        word[3] = T.uint32(0)
        key[0] = T.Cast("uint32", seed_low)
        key[1] = T.Cast("uint32", seed_high)
        for i in T.unroll(10):
            key[2] = word[1]
            key[3] = word[3]
            key[4] = T.Cast("uint32", (T.Cast("uint64", word[0]) * T.uint64(PHILOX[0])) >> T.uint64(32))
            key[5] = word[0] * T.uint32(PHILOX[0])
            word[0] = T.Cast("uint32", (T.Cast("uint64", word[2]) * T.uint64(PHILOX[1])) >> T.uint64(32)) ^ key[2] ^ key[0]
            word[1] = word[2] * T.uint32(PHILOX[1])
            word[2] = key[4] ^ key[3] ^ key[1]
            word[3] = key[5]
            key[0] = key[0] + T.uint32(PHILOX[2])
            key[1] = key[1] + T.uint32(PHILOX[3])

    @T.inline
    def gumbel(result, word):
        # -log(-log(1 - v)), v uniform in (0, 1); the series keeps small v exact
        result = (T.Cast("float32", word >> T.uint32(8)) + T.float32(0.5)) * T.float32(2.0**-24)
        if result < T.float32(1.0 / 64):
            result = result * (T.float32(1) + result * (T.float32(0.5) + result * (
                T.float32(1.0 / 3) + result * T.float32(0.25))))
        else:
            result = -T.log(T.float32(1) - result)
        result = -T.log(result)

    @T.inline
    def load4(values, logits, row, first, offset):
        # logits of tokens first .. first + 3; -inf beyond the vocabulary
        for i in T.unroll(4):
            values[offset + i] = T.float32("-inf")
        if WIDE:
            if first < V:
                T.ptx[LOAD + ".v4.b32"](values[offset], values[offset + 1], values[offset + 2], values[offset + 3],
                                             logits.ptr_to([row, first]))
        else:
            for i in T.unroll(4):
                if first + i < V:
                    if fresh:
                        T.ptx["ld.global.cg.b32"](values[offset + i], logits.ptr_to([row, first + i]))
                    else:
                        values[offset + i] = logits[row, first + i]

    @T.inline
    def load_counts4(seen, counts, counts_row, first, offset):
        for i in T.unroll(4):
            seen[offset + i] = 0
        if counts_row >= 0:
            if WIDE:
                if first < V:
                    T.ptx["ld.global.v4.b32"](seen[offset], seen[offset + 1], seen[offset + 2], seen[offset + 3],
                                              counts.ptr_to([counts_row, first]))
            else:
                for i in T.unroll(4):
                    if first + i < V:
                        seen[offset + i] = counts[counts_row, first + i]

    @T.inline
    def find_stale(stale, counts, counts_row, counters, row):
        # the token that a step whose result was dropped has counted for this very position, else -1
        stale = -1
        if counts_row >= 0:
            if counts[counts_row, V + 1] == counters[row, POSITION]:
                stale = counts[counts_row, V]

    @T.inline
    def adjust(value, seen, token, row, settings, counters, counts, counts_row, stale, allowed, scale):
        # penalties, bias, mask, temperature
        if seen != 0:
            now = T.meta_var(seen - T.if_then_else(token == stale, 1, 0))
            if (now & (IN_PROMPT | COUNT_MASK)) != 0:
                value = T.if_then_else(value > T.float32(0), value / settings[row, REPETITION],
                                       value * settings[row, REPETITION])
            if (now & COUNT_MASK) > 0:
                value = value - (settings[row, FREQUENCY] * T.Cast("float32", now & COUNT_MASK) + settings[row, PRESENCE])
            edit = T.meta_var(seen >> COUNT_BITS & EDIT_MASK)
            if edit > 0:
                value = value + T.cuda.uint_as_float(T.Cast("uint32", counts[counts_row, V + edit]))
        if MASKED:
            if T.And(counters[row, MASK_ROW] >= 0, token < V):
                if ((allowed[counters[row, MASK_ROW], token // 32] >> (token % 32)) & 1) == 0:
                    value = T.float32("-inf")
        value = value * scale

    @T.inline
    def better(best, token, value, other):
        if T.Or(value > best, T.And(value == best, other < token)):
            best = value
            token = other

    @T.inline
    def combine_sums(peak, total, other_peak, other_total):
        # (maximum, sum of exp relative to it) of two parts, the second possibly empty (-inf, 0)
        if other_peak > T.float32("-inf"):
            if peak >= other_peak:
                total = total + other_total * T.exp(other_peak - peak)
            else:
                total = other_total + T.if_then_else(peak > T.float32("-inf"), total * T.exp(peak - other_peak),
                                                     T.float32(0))
                peak = other_peak

    def filtered(settings: Any, counters: Any, row: Any) -> Any:
        return T.Or(T.Or(counters[row, TOP_K] > 0, settings[row, TOP_P] < T.float32(1)),
                    T.Or(settings[row, MIN_P] > T.float32(0), settings[row, TYPICAL_P] < T.float32(1)))

    return SimpleNamespace(philox=philox, gumbel=gumbel, load4=load4, load_counts4=load_counts4, adjust=adjust,
                           find_stale=find_stale, better=better, combine_sums=combine_sums, filtered=filtered)
