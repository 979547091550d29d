"""`PipelineConfig`: the switches of the pass pipeline, frozen and hashable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineConfig:
    """`disabled` names passes of ours to leave out (see `pipeline.OPTIONAL`), `enabled` those that run on request alone
    (`pipeline.ON_REQUEST`); `fixed_weights` are checkpoint tensors whose stored numbers are kept. `decode_buckets` are
    the batch sizes and `prefill_buckets` the token counts that get a function of their own, `spread_buckets` those of the
    first that get two (SpreadDecode); with `cuda_graph` each is captured as one graph."""

    disabled: frozenset[str] = frozenset()
    decode_buckets: tuple[int, ...] = ()
    prefill_buckets: tuple[int, ...] = ()
    cuda_graph: bool = False
    enabled: frozenset[str] = frozenset()
    fixed_weights: frozenset[str] = frozenset()
    spread_buckets: tuple[int, ...] = ()
