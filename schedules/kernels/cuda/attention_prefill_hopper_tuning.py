"""The search space of Hopper's prefill attention, what it can serve, and the choice where nobody has tuned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relaxpack.kernel_spec import AttentionSpec

SHARED_LIMIT = 227 * 1024
GROUP = 128                       # threads of a warpgroup
INFO = 8                          # words that describe a tile of queries to the consumers


@dataclass(frozen=True)
class HopperTuning:
    """The search space. `keys` of a tile, `stages` of key and value tiles, `query_stages` of query tiles; `packed`: the
    query heads of a KV head share a tile; `blocks`: persistent blocks, 0 for one a tile; `ping_pong`: the consumers issue
    their matmuls in turns, so that one's softmax meets the other's. Of pages of e4m3 numbers: `raw_stages` tiles on their
    way to be converted."""

    consumers: int = 2
    keys: int = 128
    stages: int = 2
    query_stages: int = 2
    packed: bool = True
    blocks: int = 132
    ping_pong: bool = True
    raw_stages: int = 2

    @property
    def rows(self) -> int:
        return 64 * self.consumers

    def producers(self, spec: AttentionSpec) -> int:
        """Warps of which one fetches and, of e4m3 pages, the others convert: two warpgroups if the registers suffice."""
        return 8 if spec.fp8 and self.consumers == 2 and spec.head_dim < 256 else 4

    def threads(self, spec: AttentionSpec) -> int:
        return self.consumers * GROUP + self.producers(spec) * 32

    def tokens(self, spec: AttentionSpec) -> int:
        """Tokens of a tile of queries."""
        return self.rows // (spec.num_heads // spec.num_kv_heads) if self.packed else self.rows

    def grid(self, spec: AttentionSpec, t: Any, sequences: Any, least: Any = min) -> Any:
        """Number of blocks for `t` tokens of so many sequences."""
        tiles = ((t + self.tokens(spec) - 1) // self.tokens(spec) + sequences) * (
            spec.num_kv_heads if self.packed else spec.num_heads)
        return least(tiles, self.blocks) if self.blocks else tiles

    def registers(self, spec: AttentionSpec) -> tuple[int, int]:
        """Of a thread of the warps that fetch (and convert e4m3 pages), and of those that attend."""
        if spec.fp8:                                     # with these ptxas spills nothing
            return 56, (152 if self.consumers == 3 else 224 if spec.head_dim == 256 else 200)
        return (40, 232) if self.consumers == 2 else (32, 160)


NARROW = HopperTuning(raw_stages=4)         # for heads of 64


def supported(spec: AttentionSpec) -> bool:
    return fits(spec, default_tuning(spec))


def fits(spec: AttentionSpec, tuning: HopperTuning) -> bool:
    """Whether a tile of keys is whole boxes of 8-row groups of pages, and accumulators and tiles have room."""
    size, keys = spec.page_size, tuning.keys
    boxes = size % 8 == 0 and keys // min(size, keys) <= 32 and (keys % size == 0 or size % keys == 0)
    registers = spec.head_dim // 2 + keys // 2 + keys // 4 + 30
    group = spec.num_heads // spec.num_kv_heads
    return (spec.head_dim in (64, 128, 256) and boxes and registers <= tuning.registers(spec)[1]
            and not (tuning.packed and group > tuning.rows) and shared_bytes(spec, tuning) <= SHARED_LIMIT)


def default_tuning(spec: AttentionSpec) -> HopperTuning:
    if spec.head_dim == 256:
        return HopperTuning(keys=64, query_stages=1)
    if spec.head_dim == 64 and spec.fp8:
        wide = HopperTuning(consumers=3, keys=96, query_stages=1, raw_stages=4)
        return wide if fits(spec, wide) else NARROW                  # no page of 64 tokens or more divides 96 keys
    return HopperTuning(consumers=3 if spec.head_dim == 64 else 2)


def default_for_few(spec: AttentionSpec) -> tuple[int, HopperTuning] | None:
    """Narrower tiles while they do not fill the multiprocessors once."""
    if spec.head_dim != 64 or not fits(spec, NARROW) or default_tuning(spec) == NARROW:
        return None
    return NARROW.blocks * NARROW.rows // spec.num_heads, NARROW


def shared_bytes(spec: AttentionSpec, tuning: HopperTuning) -> int:
    rows = tuning.query_stages * tuning.rows + 2 * tuning.stages * tuning.keys
    raw = tuning.raw_stages * (tuning.keys * spec.head_dim + 8 + 8 + 4) if spec.fp8 else 0
    return raw + rows * spec.head_dim * 2 + (8 + 8 + 4 * INFO) * tuning.query_stages + 8 * (4 * tuning.stages + 1)
