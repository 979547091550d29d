"""Which passes run: those that may be left out, those on request, and `PipelineConfig`, the switches of one pipeline.
Imports no TVM, so that the command line can list them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HIGHEST_LEVEL = 3
# Passes that may be left out, and the optimisation level from which on they run. Without any of them a model is still
# right: unfused operations go through TVM's legalisation, and memory is allocated as it is needed.
OPTIONAL: dict[str, int] = {
    "ShareRopeTable": 1, "FoldConstant": 1, "EliminateCommonSubexpr": 1, "PlanMemory": 1,
    "FoldScales": 2, "CombineParallelMatmul": 2, "FuseEpilogues": 2, "FuseAddNorm": 2, "FuseOps": 2,
    "FuseNormLinear": 2, "FuseRopeAppendAttention": 2,
    "SelectRowsEarly": 3, "RewriteCUDAGraph": 3,
}
# Passes that run only where they are asked for by name, and what they need to do something. They cost accuracy or win
# nothing by measurement (docs/passes.md).
ON_REQUEST: dict[str, str] = {
    "FoldNormWeights": "norms before float weights alone",
    "FuseResidual": "matmuls whose result a residual is added to, at -O2",
    "FuseHeadSample": "decode steps of a GPU with at most 8 sequences, a float head",
    "SpreadDecode": "decode steps of a GPU, layers without a window",
}


def left_out(level: int, disabled: Iterable[str] = ()) -> frozenset[str]:
    """The optional passes that do not run at `-O<level>`, and those disabled by name."""
    return frozenset(disabled) | {name for name, since in OPTIONAL.items() if since > level}


@dataclass(frozen=True)
class PipelineConfig:
    """`disabled` names passes of ours to leave out (see OPTIONAL), `enabled` those that run on request alone (ON_REQUEST);
    `fixed_weights` are checkpoint tensors whose stored numbers are kept. `decode_buckets` are the batch sizes and
    `prefill_buckets` the token counts that get a function of their own, `spread_buckets` those of the first that get two
    (SpreadDecode); with `cuda_graph` each is captured as one graph."""

    disabled: frozenset[str] = frozenset()
    decode_buckets: tuple[int, ...] = ()
    prefill_buckets: tuple[int, ...] = ()
    cuda_graph: bool = False
    enabled: frozenset[str] = frozenset()
    fixed_weights: frozenset[str] = frozenset()
    spread_buckets: tuple[int, ...] = ()
