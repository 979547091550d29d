"""`Chain`: whole layers of a decode step as calls of kernels, in plain values. A kernel alone beside one neighbour is not a
step: what counts is the time of the layers it stands in (docs/tuning.md, section 6). Imports no TVM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from relaxpack.tuning_record import Workload

CHAIN_ROUNDS = 25
CHAIN_GAIN = 0.003           # of a chain's time: what a kernel must gain; MIN_GAIN is about the time of a kernel alone
CHAIN_FINALISTS = 6          # more than of kernels alone: who is fast there is not who is fast in a layer
LEAST_LAYERS = 4


@dataclass(frozen=True)
class ChainCall:
    """`buffers`: (name in the contract of kernel_spec, name of the value) of what the kernel reads and writes. A value that
    no earlier call writes is an input. `layer`: which of the chain's it belongs to."""

    work: Workload
    buffers: tuple[tuple[str, str], ...]
    layer: int


@dataclass(frozen=True)
class Chain:
    """`layers` whole layers of `function` (decode of exactly `rows` rows), one behind the other."""

    function: str
    rows: int
    calls: tuple[ChainCall, ...]

    @property
    def layers(self) -> int:
        return 1 + self.calls[-1].layer

    def works(self) -> dict[str, Workload]:
        """What has to be compiled: the workload of each kernel, by its hash."""
        return {call.work.hash: call.work for call in self.calls}

    def calls_of(self, work_hash: str) -> int:
        """In one layer."""
        return sum(call.work.hash == work_hash for call in self.calls) // self.layers

    def to_json(self) -> dict[str, Any]:
        works = self.works()
        return {"function": self.function, "rows": self.rows, "works": {key: asdict(work) for key, work in works.items()},
                "calls": [[call.work.hash, dict(call.buffers), call.layer] for call in self.calls]}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Chain:
        works = {key: Workload(**work) for key, work in told["works"].items()}
        return cls(told["function"], told["rows"], tuple(
            ChainCall(works[key], tuple(buffers.items()), layer) for key, buffers, layer in told["calls"]))
