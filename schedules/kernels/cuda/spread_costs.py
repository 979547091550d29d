"""What decode attention costs in the two graphs of a bucket, as lines through measurements on an H200
(docs/kernels_cuda_attention.md): the fused kernel, whose clusters wait for the longest sequence, and the spread one.
"""

from __future__ import annotations

from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import fused_tuning
from relaxpack.spread_costs import SpreadCosts

BYTES_PER_US = 4.2e6          # what attention reads from memory
AGAIN, SHARED = 0.4, 0.13     # of that time: keys that L2 still has, keys that the prefix kernel multiplies once more


def spread_costs(spec: AttentionSpec, rows: int, arch: str) -> SpreadCosts:
    """Microseconds a layer, for a bucket of `rows` sequences."""
    key = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_item_bytes / BYTES_PER_US
    more = 2 + spec.head_dim / 16
    fused, longest = fused_tuning(spec, rows, arch), 0.0
    if fused is not None:        # a tile of a block: arithmetic, or the latency of memory where little is in flight
        tile = max(0.21 + 0.0031 * spec.head_dim, 0.75 / (fused.stages - 1))
        longest = tile / (fused.keys * fused.cluster)
    return SpreadCosts(longest, key, AGAIN * key, SHARED * key, more / 2 if rows == 1 else more)
