"""Paged decode attention for CUDA: one query token per sequence, split over keys with a fixed grid, then merged.

The work of a step is all (sequence, KV head, tile of keys) in order; every block takes an equal share of it whatever
the lengths are, so the grid is a constant, ragged batches balance, and the temporaries do not grow with the batch.
A block that ends up with a whole (sequence, head) writes the result; those that were cut, at most one per block, are
merged by stage two. Leading keys that rows share are read once by a kernel before that. The floor is the bytes of the
keys and values over the read bandwidth.
"""

from __future__ import annotations

from relaxpack.kernel_spec import AttentionSpec, Dim, Kernel, Stage
from relaxpack.schedules.kernels.cuda.attention_decode_merge import decode_merge_function
from relaxpack.schedules.kernels.cuda.attention_decode_split import decode_split_function
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS, DecodeTuning, default_tuning, spread_tuning
from relaxpack.schedules.kernels.cuda.attention_prefix import (
    PrefixTuning,
    prefix_function,
    prefix_tuning,
    shares_prefix,
)
from relaxpack.schedules.kernels.cuda.attention_prefix_hopper import (
    HopperPrefixTuning,
    hopper_prefix_tuning,
    prefix_merge_function,
    prefix_parts_function,
)
from relaxpack.schedules.kernels.cuda.fragments import check_pages, early_launch, finish, page_name
from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import reserve


def decode_attention(spec: AttentionSpec, arch: str = "sm_90a", tuning: DecodeTuning | None = None) -> Kernel:
    """q I[t, H*D], layer, pages, page_table i32[t, max_pages], lengths i32[t] → y I[t, H*D]; rows of length 0 give 0."""
    check_pages("decode attention", spec)
    tuning = tuning or default_tuning(spec, arch)
    name = f"decode_attention_{_facts(spec)}"
    return Kernel(_split_and_merge(spec, tuning, arch, name, shared=False), source="rule:cuda.decode_attention",
                  temporaries=_temporaries(spec, tuning))


def spread_attention(spec: AttentionSpec, rows: int, arch: str = "sm_90a", tuning: DecodeTuning | None = None,
                     prefix: PrefixTuning | HopperPrefixTuning | None = None) -> Kernel | None:
    """As `decode_attention`, with `shared` i32[t] (see SHARED_KEYS), chosen for `rows` rows: one has nothing to share. Right
    for any number, `prefix` given. None where no kernel reads shared keys once."""
    if not shares_prefix(spec, arch):
        return None
    early, tuning = early_launch(arch), tuning or spread_tuning(spec, rows, arch)
    name = f"spread_attention_{_facts(spec)}"
    own = f"{name}_w{tuning.warps}s{tuning.stages}b{tuning.blocks}k{tuning.key_tiles}" + "c" * tuning.compact
    if rows == 1 and prefix is None:
        return Kernel(_split_and_merge(spec, tuning, arch, own + "_alone", shared=False),
                      source="rule:cuda.spread_attention", temporaries=_temporaries(spec, tuning))
    prefix = prefix or hopper_prefix_tuning(spec, rows, arch) or prefix_tuning(spec, rows, arch)
    first, parts = (_prefix_of_parts(spec, prefix, name, early) if isinstance(prefix, HopperPrefixTuning)
                    else (_prefix(spec, prefix, name, early), {}))
    temporaries = {**parts, "prefix": (("t", spec.num_heads * spec.head_dim), "float32"),
                   "prefix_stats": (("t", spec.num_heads, 2), "float32"), **_temporaries(spec, tuning)}
    return Kernel((*first, *_split_and_merge(spec, tuning, arch, own, shared=True)), source="rule:cuda.spread_attention",
                  temporaries=temporaries)


def _prefix(spec: AttentionSpec, tuning: PrefixTuning, name: str, early: bool) -> tuple[Stage, ...]:
    return (Stage(finish(prefix_function(spec, tuning, early), early, cluster=tuning.cluster),
                  f"{name}_w{tuning.warps}s{tuning.stages}h{tuning.shares}_prefix",
                  inputs=("q", "layer", "pages", "page_table", "shared"), outputs=("prefix", "prefix_stats")),)


def _prefix_of_parts(spec: AttentionSpec, tuning: HopperPrefixTuning, name: str,
                     early: bool) -> tuple[tuple[Stage, ...], dict[str, tuple[tuple[Dim, ...], str]]]:
    """Its stages and what is between them."""
    own = f"{name}_p{tuning.splits}k{tuning.keys}s{tuning.stages}_prefix"
    return ((Stage(finish(prefix_parts_function(spec, tuning), early), own, outputs=("parts", "part_stats"),
                   inputs=("q", "layer", "pages", "page_table", "shared")),
             Stage(finish(prefix_merge_function(spec, tuning, early), early, "xy", shared=False), own + "_merge",
                   inputs=("parts", "part_stats", "shared"), outputs=("prefix", "prefix_stats"))),
            {"parts": (("t", tuning.splits, spec.num_heads * spec.head_dim), "float32"),
             "part_stats": (("t", tuning.splits, spec.num_heads, 2), "float32")})


def _facts(spec: AttentionSpec) -> str:
    return (f"{page_name(spec)}_h{spec.num_heads}x{spec.num_kv_heads}_d{spec.head_dim}_p{spec.page_size}x{spec.max_pages}"
            + (f"_w{spec.window}" if spec.window else ""))


def _split_and_merge(spec: AttentionSpec, tuning: DecodeTuning, arch: str, name: str, shared: bool) -> tuple[Stage, Stage]:
    early, per_multiprocessor = early_launch(arch), -(-tuning.blocks // LIMITS[arch][2])
    split = decode_split_function(spec, tuning, early, shared, reserve(arch, per_multiprocessor))
    given = ("shared", "prefix", "prefix_stats") if shared else ()
    return (Stage(finish(split, early), name + "_split", inputs=("q", "layer", "pages", "page_table", "lengths", *given),
                  outputs=("y", "partial", "stats", "cuts")),
            Stage(finish(decode_merge_function(spec, tuning, early), early, "xy"), name + "_merge",
                  inputs=("partial", "stats", "cuts", "y"), outputs=(), inplace=("y",)))


def _temporaries(spec: AttentionSpec, tuning: DecodeTuning) -> dict[str, tuple[tuple[Dim, ...], str]]:
    group = spec.num_heads // spec.num_kv_heads
    return {"partial": ((2 * tuning.blocks, group * spec.head_dim), "float32"),
            "stats": ((2 * tuning.blocks, 2, group), "float32"), "cuts": ((tuning.blocks, 4), "int32")}
