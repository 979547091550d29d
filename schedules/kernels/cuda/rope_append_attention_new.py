"""The new key and value of a step in the kernel that does RoPE, append and attention: a warp loads them, rotates the key,
keeps both in shared memory (`fresh`, two numbers a word) and writes them to the pages.
"""

from __future__ import annotations

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.fragments import high, low, pack, shuffle_xor
from relaxpack.schedules.kernels.cuda.pages_fp8 import pack_e4m3
from tvm.script import tirx as T


@T.inline
def rotate(x, cos, sin, at):
    """Two elements x[0], x[1] of the first half with x[2], x[3] of the second, by angles at, at + 1."""
    turned: T.float32
    for i in T.unroll(2):
        turned = x[i] * cos[at + i] - x[2 + i] * sin[at + i]
        x[2 + i] = x[2 + i] * cos[at + i] + x[i] * sin[at + i]
        x[i] = turned


class NewToken:
    """`per_lane`: words of a lane: of rotated pairs, of other parts of the key, of the value. A word of `fresh` and of the
    ring is two elements: 32 bits, or 16 of e4m3 numbers; `chunk` words are 16 bytes of the key."""

    def __init__(self, spec: AttentionSpec) -> None:
        D, R, H, KV, PS = spec.head_dim, spec.rotary_dim, spec.num_heads, spec.num_kv_heads, spec.page_size
        act, FP8 = spec.activation_dtype, spec.fp8
        NORM, EPS = spec.qk_norm_epsilon is not None, float(spec.qk_norm_epsilon or 0.0)
        HALF = R // 2
        PAIRS, PLAIN, WORDS = R // 4, (D - R) // 2, D // 2               # words of the new key: rotated pairs, others, all
        EP, EL, EV = -(-PAIRS // 32), -(-PLAIN // 32), -(-WORDS // 32)   # of each, a lane's share
        PACK = pack(act)
        WORD, CHUNK = ("uint16", 8) if FP8 else ("uint32", 4)
        STORE = "st.global.b16" if FP8 else "st.global.b32"
        self.pairs, self.words, self.per_lane, self.word, self.chunk = PAIRS, WORDS, (EP, EL, EV), WORD, CHUNK

        @T.inline
        def load(words, qkv, row, kv_head, lane):
            """This lane's words of the new key (rotated pairs, others) and of the new value."""
            key = T.meta_var((H + kv_head) * D)
            for e in T.unroll(2 * EP + EL + EV):
                words[e] = T.uint32(0)
            for e in T.unroll(EP):
                if lane + 32 * e < PAIRS:
                    T.ptx["ld.global.b32"](words[2 * e], qkv.ptr_to([row, key + (lane + 32 * e) * 2]))
                    T.ptx["ld.global.b32"](words[2 * e + 1], qkv.ptr_to([row, key + HALF + (lane + 32 * e) * 2]))
            for e in T.unroll(EL):
                if lane + 32 * e < PLAIN:
                    T.ptx["ld.global.b32"](words[2 * EP + e], qkv.ptr_to([row, key + R + (lane + 32 * e) * 2]))
            for e in T.unroll(EV):
                if lane + 32 * e < WORDS:
                    T.ptx["ld.global.b32"](words[2 * EP + EL + e],
                                           qkv.ptr_to([row, (H + KV + kv_head) * D + (lane + 32 * e) * 2]))

        @T.inline
        def keep(fresh, which, at, words, w, x, first):
            """Two new numbers, f32 → `fresh`."""
            if FP8:
                fresh[which, at] = T.Cast(WORD, pack_e4m3(x[first + 1], x[first]))
            else:
                T.ptx[PACK](words[w], x[first + 1], x[first])
                fresh[which, at] = words[w]

        @T.inline
        def keep_plain(fresh, which, at, words, w):
            """Two new numbers as they came → `fresh`."""
            if FP8:
                fresh[which, at] = T.Cast(WORD, pack_e4m3(high(act, words[w]), low(act, words[w])))
            else:
                fresh[which, at] = words[w]

        @T.inline
        def turn(words, x, cos, sin, fresh, k_norm, lane):
            """Rotates the new key; key and value go to `fresh`."""
            total: T.float32
            if NORM:
                total = T.float32(0)
                for e in T.unroll(2 * EP + EL):
                    x[0] = low(act, words[e])
                    x[1] = high(act, words[e])
                    total = total + x[0] * x[0] + x[1] * x[1]
                for i in T.unroll(5):
                    total = total + shuffle_xor(total, 1 << i)
                total = T.rsqrt(total * T.float32(1.0 / D) + T.float32(EPS))
            for e in T.unroll(EP):
                if lane + 32 * e < PAIRS:
                    for j in T.unroll(2):
                        x[2 * j] = low(act, words[2 * e + j])
                        x[2 * j + 1] = high(act, words[2 * e + j])
                        if NORM:
                            for i in T.unroll(2):
                                x[2 * j + i] = x[2 * j + i] * total * k_norm[j * HALF + (lane + 32 * e) * 2 + i]
                    rotate(x, cos, sin, 2 * e)
                    for j in T.unroll(2):
                        keep(fresh, 0, lane + 32 * e + j * PAIRS, words, 2 * e + j, x, 2 * j)
            for e in T.unroll(EL):
                if lane + 32 * e < PLAIN:
                    if NORM:
                        x[0] = low(act, words[2 * EP + e])
                        x[1] = high(act, words[2 * EP + e])
                        for i in T.unroll(2):
                            x[i] = x[i] * total * k_norm[R + (lane + 32 * e) * 2 + i]
                        keep(fresh, 0, 2 * PAIRS + lane + 32 * e, words, 2 * EP + e, x, 0)
                    else:
                        keep_plain(fresh, 0, 2 * PAIRS + lane + 32 * e, words, 2 * EP + e)
            for e in T.unroll(EV):
                if lane + 32 * e < WORDS:
                    keep_plain(fresh, 1, lane + 32 * e, words, 2 * EP + EL + e)
            T.cuda.warp_sync()

        @T.inline
        def append(fresh, pages, layer, slot, kv_head, lane):
            for j in T.unroll(2):
                for e in T.unroll(EV):
                    if lane + 32 * e < WORDS:
                        T.ptx[STORE](pages.ptr_to([
                            layer, T.Cast("int64", slot // PS), j, T.Cast("int64", kv_head), T.Cast("int64", slot % PS),
                            (lane + 32 * e) * 2]), fresh[j, lane + 32 * e])

        self.load, self.turn, self.append = load, turn, append
