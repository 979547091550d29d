"""The search space of the decode attention kernel, and the choice where nobody has tuned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec


@dataclass(frozen=True)
class DecodeTuning:
    """The search space: `warps` x `key_tiles` x 16 keys are one tile, `stages` tiles are in flight, `blocks` is the
    grid. `compact`: stage two has a block for each (sequence, KV head), if they are fewer, not for each block."""

    warps: int
    stages: int
    blocks: int
    key_tiles: int = 1
    compact: bool = False

    @property
    def warp_keys(self) -> int:
        return 16 * self.key_tiles

    @property
    def keys(self) -> int:
        return self.warps * self.warp_keys


def shared_bytes(spec: AttentionSpec, tuning: DecodeTuning) -> int:
    return (tuning.stages * 2 * tuning.keys * row_chunks(spec.head_dim, spec.kv_item_bytes) * 16
            + 2 * tuning.warps * head_columns(spec) * 4)


def room_for_outputs(spec: AttentionSpec, tuning: DecodeTuning) -> bool:
    """Whether a warp's part of a stage has room for its outputs, which take its place where a row ends."""
    return head_columns(spec) * spec.head_dim <= 2 * tuning.warp_keys * row_chunks(spec.head_dim, spec.kv_item_bytes) * 4


def row_chunks(head_dim: int, item_bytes: int = 2) -> int:
    """16-byte chunks a row of keys takes in shared memory: exact where XOR can spread them over the banks, else odd."""
    chunks = head_dim * item_bytes // 16
    return chunks if chunks % 8 == 0 else chunks | 1


def head_columns(spec: AttentionSpec) -> int:
    return -(-(spec.num_heads // spec.num_kv_heads) // 8) * 8


# shared memory per block and per multiprocessor, and multiprocessors of the card we expect
LIMITS = {"sm_80": (163, 164, 108), "sm_86": (99, 100, 84), "sm_89": (99, 100, 142), "sm_90": (227, 228, 132),
          "sm_90a": (227, 228, 132), "sm_100a": (227, 228, 148), "sm_120": (99, 100, 170)}


def spread_tuning(spec: AttentionSpec, rows: int, arch: str) -> DecodeTuning:
    """For batches whose lengths differ or that share leading keys."""
    tuning, (_, multiprocessor_kb, count) = default_tuning(spec, arch), LIMITS[arch]
    if rows <= MANY_ROWS:            # two stages leave L1 to the matmuls beside it
        tuning = replace(tuning, stages=2)
        wide = replace(tuning, warps=8, blocks=count)
        if spec.head_dim * spec.kv_item_bytes <= 128 and multiprocessor_kb > 200:
            return wide
        return replace(tuning, compact=compacts(spec, rows))
    blocks = min(3, int(multiprocessor_kb / (shared_bytes(spec, tuning) / 1024 + 1)))
    return replace(tuning, blocks=count * blocks)


MANY_ROWS = 8                      # beyond, matmuls are not gemm_rows and need no L1


def compacts(spec: AttentionSpec, rows: int) -> bool:
    """Whether stage two gains by having few blocks: there are so many otherwise, a block of stage one and a query head each,
    that they come in waves, and so few (sequence, KV head) pairs that looking for their cuts takes no longer than these.
    Measured for head_dim 128 (docs/kernels_cuda_attention.md)."""
    return spec.head_dim == 128 and spec.num_heads >= 4 * spec.num_kv_heads and rows * spec.num_kv_heads <= 32


def default_tuning(spec: AttentionSpec, arch: str) -> DecodeTuning:
    """Two blocks per multiprocessor (measured best on an H200: docs), 32 keys a warp where rows are short; e4m3 pages: half
    the bytes take as much arithmetic, so twice the warps."""
    block_kb, multiprocessor_kb, count = LIMITS[arch]
    small = spec.head_dim <= 64
    first = (8, 2, 1) if spec.fp8 else (4, 3 if small else 2, 2 if small else 1)
    for warps, stages, key_tiles in (first, (4, 2, 1), (2, 2, 1), *(((4, 2, 2), (4, 2, 4), (2, 2, 4)) if spec.fp8 else ())):
        tuning = DecodeTuning(warps, stages, 0, key_tiles)
        size = shared_bytes(spec, tuning) / 1024
        if size <= block_kb and room_for_outputs(spec, tuning):
            return replace(tuning, blocks=count * max(1, min(2, int(multiprocessor_kb / (size + 1)))))
    raise CompileError(f"decode attention: head_dim {spec.head_dim} with {spec.num_heads // spec.num_kv_heads} query heads "
                       f"to a KV head does not fit the shared memory of {arch}")
