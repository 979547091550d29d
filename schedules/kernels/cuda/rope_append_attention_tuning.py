"""What may vary of the kernel that does RoPE, append and decode attention in one launch, what it can serve, and from which
batch on the kernels one by one are better.
"""

from __future__ import annotations

from dataclasses import dataclass

from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_decode_tile import DecodeTile
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS, row_chunks
from relaxpack.schedules.kernels.cuda.fragments import SHORT, early_launch


@dataclass(frozen=True)
class FusedTuning:
    """`cluster` blocks share the keys of a (sequence, KV head); `warps` x `key_tiles` x 16 keys are one tile of a block,
    `stages` tiles its ring."""

    cluster: int
    warps: int
    stages: int
    key_tiles: int = 1

    @property
    def keys(self) -> int:
        return self.warps * self.key_tiles * 16

    def shared_bytes(self, spec: AttentionSpec) -> int:
        sources, count, dims, heads = inbox_shape(spec, self)
        merged = sources * heads * (count * dims + 2) * 4
        return self.stages * 2 * self.keys * row_chunks(spec.head_dim) * 16 + merged + 2 * spec.head_dim * 2


def group_of(spec: AttentionSpec) -> int:
    return spec.num_heads // spec.num_kv_heads


def units(spec: AttentionSpec, tuning: FusedTuning) -> int:
    """Parts of 8 elements of head_dim that one block of a cluster merges."""
    return -(-spec.head_dim // 8 // tuning.cluster)


def inbox_shape(spec: AttentionSpec, tuning: FusedTuning) -> tuple[int, int, int, int]:
    """What the warps of a cluster send to a block: by warp, unit, element and query head (an even number)."""
    return tuning.cluster * tuning.warps, units(spec, tuning), 8, group_of(spec) + group_of(spec) % 2


def can_fuse(spec: AttentionSpec, arch: str) -> bool:
    """Whether there is such a kernel: clusters, halves of the rotation a multiple of 8, pages that suit the copies."""
    return (early_launch(arch) and spec.activation_dtype == spec.kv_dtype and spec.kv_dtype in SHORT
            and spec.head_dim % 16 == spec.rotary_dim % 16 == 0 and spec.num_heads % spec.num_kv_heads == 0
            and DecodeTile(spec, 1).ahead)


def fused_tuning(spec: AttentionSpec, rows: int, arch: str) -> FusedTuning | None:
    """The choice for a batch of `rows`, None where kernels one by one are better."""
    if not can_fuse(spec, arch):
        return None
    limit = LIMITS[arch][0] * 1024
    for cluster, warps, stages in ((8, 4, 3), (8, 4, 2), (8, 2, 2)):
        tuning = FusedTuning(cluster, warps, stages)
        if tuning.shared_bytes(spec) <= limit and rows * spec.num_kv_heads * cluster <= 4 * LIMITS[arch][2]:
            return tuning
    return None
