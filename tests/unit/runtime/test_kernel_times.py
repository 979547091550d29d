"""How a kernel is timed on a GPU, over stand-ins of the CUDA calls: what is queued in which order."""

from __future__ import annotations

import pytest

from relaxpack.runtime import cuda_memory
from relaxpack.runtime.vm import time_on_stream


def test_the_launch_is_queued_behind_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between flush and end of a run the host waits for nothing; the best run counts, the first one not at all, and two
    events alone are taken off."""
    calls: list[str] = []
    clock = iter([1.5e-6, 1e-6, 9e-6, 5e-6, 2e-6, 3e-6])

    class Span:
        def begin(self) -> None:
            calls.append("begin")

        def end(self) -> None:
            calls.append("end")

        def seconds(self) -> float:
            calls.append("wait")
            return next(clock)

    monkeypatch.setattr(cuda_memory, "Span", Span)
    best = time_on_stream(lambda *given: calls.append(f"kernel{given}"), (1, 2), 3, lambda: calls.append("flush"))
    assert best == 1e-6
    assert calls == ["kernel(1, 2)", *["flush", "begin", "end", "wait"] * 3,
                     *["flush", "begin", "kernel(1, 2)", "end", "wait"] * 3]
