"""What decode attention costs in the two graphs of a bucket, as lines through measurements on an H200
(docs/kernels_cuda_attention.md): the fused kernel, whose clusters wait for the longest sequence, and the spread one.
"""

from __future__ import annotations

from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.attention_decode_tuning import LIMITS
from relaxpack.schedules.kernels.cuda.attention_prefix_hopper import hopper_prefix_tuning
from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import fused_tuning
from relaxpack.spread_costs import SpreadCosts

BYTES_PER_US = 4.2e6          # what attention reads from memory
AGAIN = 0.4                   # of that time: keys that L2 still has
SHARED, BY_WGMMA = 0.13, 0.03         # and keys that the prefix kernel multiplies once more
CROWDED = 1.4                 # times longer: tiles of blocks of which more than two share a multiprocessor


def spread_costs(spec: AttentionSpec, rows: int, arch: str) -> SpreadCosts:
    """Microseconds a layer, for a bucket of `rows` sequences."""
    key = 2 * spec.num_kv_heads * spec.head_dim * spec.kv_item_bytes / BYTES_PER_US
    wgmma = hopper_prefix_tuning(spec, rows, arch) is not None
    more = (4 + spec.head_dim / 32) * (1 if rows == 1 else 3 if wgmma else 2) / 3          # by the number of kernels
    fused, longest = fused_tuning(spec, rows, arch), 0.0
    if fused is not None:        # a tile of a block: arithmetic, or the latency of memory where little is in flight
        tile = max(0.21 + 0.0031 * spec.head_dim, 0.75 / (fused.stages - 1))
        crowded = rows * spec.num_kv_heads * fused.cluster > 2 * LIMITS[arch][2]
        longest = tile / (fused.keys * fused.cluster) * (CROWDED if crowded else 1)
    return SpreadCosts(longest, key, AGAIN * key, (BY_WGMMA if wgmma else SHARED) * key, more)
