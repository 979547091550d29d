"""What may vary of the kernel that does RoPE, append and decode attention in one launch, what it can serve, and what is
chosen for which batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from relaxpack.kernel_spec import AttentionSpec
from relaxpack.model_info import FP8
from relaxpack.schedules.kernels.cuda.attention_decode_tile import DecodeTile
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS, MANY_ROWS, row_chunks
from relaxpack.schedules.kernels.cuda.fragments import SHORT, early_launch


@dataclass(frozen=True)
class FusedTuning:
    """`cluster` blocks share the keys of a (sequence, KV head); `warps` x `key_tiles` x 16 keys are one tile of a block,
    `stages` tiles its ring; a block takes `reserve` bytes of shared memory at least."""

    cluster: int
    warps: int
    stages: int
    key_tiles: int = 1
    reserve: int = 0

    @property
    def keys(self) -> int:
        return self.warps * self.key_tiles * 16

    def shared_bytes(self, spec: AttentionSpec) -> int:
        sources, count, dims, heads = inbox_shape(spec, self)
        ring = self.stages * 2 * self.keys * row_chunks(spec.head_dim, spec.kv_item_bytes) * 16
        merged = sources * heads * (count * dims + 2) * 4
        return max(self.reserve, ring + merged + 2 * spec.head_dim * 2)


def reserve(arch: str, blocks: int) -> int:
    """Shared memory of which a multiprocessor has room for `blocks` blocks and no more. The driver divides L1 from shared
    memory so that as many blocks of a kernel as possible fit, and weights on their way to gemm_rows beside it need L1:
    with all of it taken, a layer of an 8B model takes 4 to 8 us longer (docs/kernels_cuda_attention.md)."""
    return LIMITS[arch][1] * 1024 // (blocks + 1) // 128 * 128 + 128 - 1024


def group_of(spec: AttentionSpec) -> int:
    return spec.num_heads // spec.num_kv_heads


def units(spec: AttentionSpec, tuning: FusedTuning) -> int:
    """Parts of 8 elements of head_dim that one block of a cluster merges."""
    return -(-spec.head_dim // 8 // tuning.cluster)


def inbox_shape(spec: AttentionSpec, tuning: FusedTuning) -> tuple[int, int, int, int]:
    """What the warps of a cluster send to a block: by warp, unit, element and query head (an even number)."""
    return tuning.cluster * tuning.warps, units(spec, tuning), 8, group_of(spec) + group_of(spec) % 2


def can_fuse(spec: AttentionSpec, arch: str) -> bool:
    """Whether there is such a kernel: clusters, halves of the rotation a multiple of 8 (16 of e4m3 numbers, of which a lane
    has four neighbours), pages that suit the copies."""
    unit = 32 if spec.fp8 else 16
    return (early_launch(arch) and spec.kv_dtype in (spec.activation_dtype, FP8) and spec.activation_dtype in SHORT
            and spec.head_dim % unit == spec.rotary_dim % unit == 0 and spec.num_heads % spec.num_kv_heads == 0
            and DecodeTile(spec, 1).ahead)


# (sequences x KV heads, at most) → cluster, stages, blocks on a multiprocessor: measured best on an H200, with 4 warps
# (docs/kernels_cuda_attention.md). The more pairs there are, the fewer blocks share one.
CHOICES = {4: (16, 3, 1), 8: (8, 4, 1), 16: (4, 4, 1), 32: (4, 2, 2), 64: (2, 3, 1), 1024: (2, 2, 2)}
# The same for e4m3 pages: cluster, warps, stages, key tiles, blocks. Half the bytes take as much arithmetic, so more warps
# or tiles have to be there; and rows of 64 bytes are so little to wait for that twice the warps pay.
FP8_CHOICES = {4: (16, 4, 2, 2, 1), 8: (8, 4, 2, 2, 1), 32: (4, 4, 2, 2, 1), 64: (2, 4, 3, 2, 1), 128: (2, 4, 3, 2, 0),
               1024: (1, 4, 3, 2, 0)}
FP8_NARROW_CHOICES = {**FP8_CHOICES, 128: (2, 8, 2, 2, 0), 1024: (1, 8, 2, 2, 0)}
LARGEST_CLUSTER = {"sm_90": 16, "sm_90a": 16, "sm_100a": 16}                               # 8 is what every one allows


def fused_tuning(spec: AttentionSpec, rows: int, arch: str) -> FusedTuning | None:
    """The choice for a batch of `rows`, None where kernels one by one are better."""
    pairs = rows * spec.num_kv_heads
    if not can_fuse(spec, arch) or pairs > max(CHOICES):
        return None
    most_warps, key_tiles = 4, 1
    if spec.fp8:
        choices = FP8_NARROW_CHOICES if spec.head_dim <= 64 else FP8_CHOICES
        cluster, most_warps, most_stages, key_tiles, blocks = choices[min(limit for limit in choices if pairs <= limit)]
        if not DecodeTile(spec, key_tiles).ahead:
            key_tiles = 1
    else:
        cluster, most_stages, blocks = CHOICES[min(limit for limit in CHOICES if pairs <= limit)]
        if rows > MANY_ROWS and pairs > 64:
            most_stages = 3
    cluster, least, budget = min(cluster, LARGEST_CLUSTER.get(arch, 8)), 0, LIMITS[arch][0]
    if rows > MANY_ROWS and 64 < pairs <= 128 and not spec.fp8:      # 256 blocks: two on a multiprocessor, not four
        least = reserve(arch, 2)
    elif rows <= MANY_ROWS and budget > 200:
        least, budget = reserve(arch, max(1, blocks)), 162
    fitting = (FusedTuning(cluster, warps, stages, key_tiles, least)
               for warps in (8, 4, 2) if warps <= most_warps for stages in range(most_stages, 1, -1))
    chosen = next((tuning for tuning in fitting if tuning.shared_bytes(spec) <= budget * 1024), None)
    if chosen is None or chosen.shared_bytes(spec) == least:
        return chosen
    return replace(chosen, reserve=0)       # it takes more anyway: the same kernel as one without, so the same name
