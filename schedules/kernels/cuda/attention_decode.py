"""Paged decode attention for CUDA: one query token per sequence, split over keys with a fixed grid, then merged.

The work of a step is all (sequence, KV head, tile of keys) in order; every block takes an equal share of it whatever
the lengths are, so the grid is a constant, ragged batches balance, and the temporaries do not grow with the batch.
A block that ends up with a whole (sequence, head) writes the result; those that were cut, at most one per block, are
merged by stage two. The floor is the bytes of the keys and values over the read bandwidth.
"""

from __future__ import annotations

from typing import Any

from relaxpack.kernel_spec import AttentionSpec, Kernel, Stage
from relaxpack.schedules.kernels.cuda.attention_decode_merge import decode_merge_function
from relaxpack.schedules.kernels.cuda.attention_decode_split import decode_split_function
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import DecodeTuning, default_tuning
from relaxpack.schedules.kernels.cuda.fragments import check_pages, early_launch, finish, page_name


def decode_attention(spec: AttentionSpec, arch: str = "sm_90a", tuning: DecodeTuning | None = None) -> Kernel:
    """q I[t, H*D], layer, pages, page_table i32[t, max_pages], lengths i32[t] → y I[t, H*D]; rows of length 0 give 0."""
    check_pages("decode attention", spec)
    tuning = tuning or default_tuning(spec, arch)
    group = spec.num_heads // spec.num_kv_heads
    name = (f"decode_attention_{page_name(spec)}_h{spec.num_heads}x{spec.num_kv_heads}_d{spec.head_dim}"
            f"_p{spec.page_size}x{spec.max_pages}" + (f"_w{spec.window}" if spec.window else ""))
    early = early_launch(arch)
    split = Stage(finish(decode_split_function(spec, tuning, early), early), name + "_split",
                  inputs=("q", "layer", "pages", "page_table", "lengths"), outputs=("y", "partial", "stats", "cuts"))
    merge = Stage(finish(decode_merge_function(spec, tuning, early), early, "xy"), name + "_merge",
                  inputs=("partial", "stats", "cuts", "y"), outputs=(), inplace=("y",))
    temporaries: dict[str, Any] = {
        "partial": ((2 * tuning.blocks, group * spec.head_dim), "float32"),
        "stats": ((2 * tuning.blocks, 2, group), "float32"),
        "cuts": ((tuning.blocks, 4), "int32"),
    }
    return Kernel((split, merge), source="rule:cuda.decode_attention", temporaries=temporaries)
