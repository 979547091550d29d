"""How a kernel is timed on a GPU, over stand-ins of the CUDA calls: what is queued in which order."""

from __future__ import annotations

from typing import Any

import pytest

from relaxpack.runtime import cuda_memory
from relaxpack.runtime.vm import time_on_stream


def test_the_launch_is_queued_behind_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between flush and end of a run the host waits for nothing; the best run counts, the first one not at all."""
    calls: list[str] = []
    clock = iter([5e-6, 2e-6, 3e-6])

    class Span:
        def begin(self) -> None:
            calls.append("begin")

        def end(self) -> None:
            calls.append("end")

        def seconds(self) -> float:
            calls.append("wait")
            return next(clock)

    def fill_zero(tensor: Any, size: int) -> None:
        assert (tensor, size) == ("flush", 64)
        calls.append("flush")

    monkeypatch.setattr(cuda_memory, "Span", Span)
    monkeypatch.setattr(cuda_memory, "fill_zero", fill_zero)
    best = time_on_stream(lambda *given: calls.append(f"kernel{given}"), (1, 2), 3, "flush", 64)
    assert best == 2e-6
    assert calls == ["kernel(1, 2)", *["flush", "begin", "kernel(1, 2)", "end", "wait"] * 3]
