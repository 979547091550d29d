"""What stage two of sampling knows of a row while it picks a token: the step's buffers, shared memory, and the variables of
a thread, under one name each, so that its parts can stand in files of their own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.kernel_spec import SamplingSpec
from relaxpack.schedules.kernels.cuda.sampling_scan import PART_TOPS, scan_blocks
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

THREADS, VECTORS = 512, 4                    # 8192 logits a round
WARPS = THREADS // 32
BINS, CANDIDATES = 2048, 8192
PER = BINS // THREADS                        # bins of a thread
KEY_BITS, KEY_SCALE = 31, float(1 << 26)     # key = distance * 2^26, distance < 32
DISTANCE_LIMIT = 31.999
MASS_BITS, MASS_HALF = 28, 14                # mass = e^-distance * 2^28; sums of its halves fit 32 bits (V < 2^18)

_ARRAYS = {                                  # of a thread: length, dtype
    "x": (4 * VECTORS, "float32"), "seen": (4 * VECTORS, "int32"),
    "ahead": (4 * VECTORS, "float32"), "seen_ahead": (4 * VECTORS, "int32"),
    "word": (4, "uint32"), "key": (6, "uint32"),             # of Philox
    "own_count": (PER, "int32"), "own_mass": (PER, "uint64"),
}
_VARIABLES = {
    "peak": "float32", "total": "float32", "best": "float32", "best_token": "int32", "score": "float32",
    "score_token": "int32",
    "norm": "float32",                       # sum of e^-distance over the row
    "bad": "int32", "token": "int32", "keep": "int32", "votes": "uint32", "value": "float32", "distance": "float32",
    "reach": "float32",                      # no kept token is farther from the maximum (a little more than `cut`)
    "noise": "float32", "scale": "float32", "counts_row": "int32", "stale": "int32", "other": "int32", "index": "int32",
    "base": "int32", "item_key": "uint32",
    "cut": "uint32",                         # largest key kept
    "mass": "uint32",
    "old": "uint32",                         # one random word
    "shift": "uint32", "bin_mask": "uint32", "prefix_shift": "uint32", "prefix": "uint32", "from_list": "int32",
    "items": "int32", "need_k": "int32", "need_p": "int32", "need_t": "int32", "by_mass": "int32", "step": "int32",
    "level": "int32", "sum_count": "int32", "sum_mass": "uint64", "before_count": "int32", "before_mass": "uint64",
    "all_count": "int32", "all_mass": "uint64", "kept_mass": "uint64", "passed_mass": "uint64", "min_cut": "uint32",
    "typical_cut": "uint32",                 # largest deviation from the mean distance kept
    "centre": "int32",                       # mean distance, as a key
    "target": "uint64", "passed": "uint64", "amount": "uint64",
}


def pick_state(spec: SamplingSpec, pool: Any, tx: Any, **given: Any) -> SimpleNamespace:
    """Shared memory out of `pool`, and the variables of thread `tx`, declared here; and what is `given` by name."""
    shared = {
        "bin_count": (BINS, "uint32"), "bin_low": (BINS, "uint32"), "bin_high": (BINS, "uint32"),    # mass in two words
        "list_key": (CANDIDATES, "uint32"), "list_token": (CANDIDATES, "int32"),
        "maxima": (scan_blocks(spec.vocab_size) * PART_TOPS, "float32"),
        "warp_mass": (WARPS, "uint64"), "warp_moment": (WARPS, "uint64"),
        "found_mass": (2, "uint64"),         # before the bin found, and its own
        "warp_count": (WARPS, "int32"),
        "found": (4, "int32"),               # bin, count before, own count, list length
        "shared_f": (max(WARPS, 4), "float32"), "shared_i": (max(WARPS, 4), "int32"),
    }
    state = SimpleNamespace(**given, tx=tx, lane=tx % 32, warp=tx // 32)
    for name, (length, dtype) in shared.items():
        setattr(state, name, IRBuilder.name(name, pool.alloc((length,), dtype, align=16)))
    pool.commit()
    for name, (length, dtype) in _ARRAYS.items():
        setattr(state, name, IRBuilder.name(name, T.alloc_buffer((length,), dtype, scope="local")))
    for name, dtype in _VARIABLES.items():
        variable = T.local_scalar(dtype).scalar
        IRBuilder.name(name, variable.source)
        setattr(state, name, variable)
    return state
