"""Stands in for `benchmarks.gpu.matmul_bench.Bench` on a machine without a GPU: tensors of torch on the CPU, kernels
that are written in torch and called with the same arguments, and times out of a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

import relaxpack.tvm_setup  # noqa: F401
import tvm


class StandIn:
    """`kernels`: function → what it does to its arguments; `times`: function → microseconds of a call, 100 where unsaid."""

    device = "cpu"

    def __init__(self, kernels: Mapping[str, Callable[..., None]], times: Mapping[str, float]) -> None:
        self.torch, self.tvm, self.kernels, self.times = torch, tvm, kernels, times
        self.modules: dict[str, Any] = {}
        self.weights: dict[Any, Any] = {}
        self.generator = torch.Generator().manual_seed(1)
        self.known_ceilings = {"read_tb_s": 4.2, "gemm_tflop_s": 780.0}
        self.called: list[str] = []

    def kernel(self, variant: dict[str, Any]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.called.append(variant["name"])
            self.kernels[variant["name"]](*arguments)

        return call

    def synchronize(self) -> None:
        pass

    def random(self, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(getattr(torch, dtype))

    def captured(self, calls: list[Callable[[], object]]) -> Callable[[], float]:
        """Runs each of the first calls once, to learn which functions they are."""
        self.called.clear()
        calls[0]()
        took = sum(self.times.get(name, 100.0) for name in self.called) or 100.0
        replays = 0

        def replay() -> float:
            nonlocal replays
            replays += 1
            return took * (1 + 0.001 * (replays % 3))

        return replay


def linear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x.double() @ weight.double().T)


def norm(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    wide = x.double()
    y.copy_(wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight)


def wrong(*arguments: Any) -> None:
    arguments[-1].fill_(math.nan)
