"""`PipelineConfig`: the switches of the pass pipeline, frozen and hashable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineConfig:
    """`disabled` names passes of ours to leave out (see `pipeline.OPTIONAL`); `cuda_graph` captures decode steps."""

    disabled: frozenset[str] = frozenset()
    cuda_graph: bool = False
