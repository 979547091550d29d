"""What one decode step of a loaded model does and how close it comes to the memory's speed: launches, bytes and FLOPs from
the bundle's own record, bandwidth measured here, and how much of a step is not spent in kernels.
"""

from __future__ import annotations

import time
from typing import Any

from relaxpack.explain.document import explanation
from relaxpack.llm import LLM
from relaxpack.step_costs import Machine, host_bandwidth

_COPY_BYTES = 1 << 30
_STEPS = 16


class StepFacts:
    """Facts for one model; the bandwidth is measured once."""

    def __init__(self, llm: LLM) -> None:
        assert llm.loaded is not None
        self._loaded = llm.loaded
        self._entry = llm.loaded.bundle.target(llm.loaded.report.target)
        self._gpu = self._entry.target.kind == "cuda"
        self.bandwidth = self._measure_bandwidth()

    def of(self, batch: int, context: int, step_seconds: float) -> dict[str, Any]:
        """`step_seconds`: of a whole step, the host's part included. `device_seconds` is what the kernels of a step take one
        behind the other: on a GPU of steps that nobody waits for in between, on a CPU their sum (batch 1 only);
        `gap_seconds` is the rest of the step. `share_of_bandwidth`: bytes that a step must move, over what memory could in
        that time."""
        machine = Machine("here", self.bandwidth, 1.0, "measured")
        step = explanation(self._loaded.bundle, batch, context, machine, target=self._entry.target.name)["step"]
        device = self._device_seconds(batch, context)
        captured = any(size >= batch for size in self._entry.buckets.get("decode", ()))
        return {"kernels": step["launches"], "launches": 1 if captured else step["launches"], "bytes": step["bytes"],
                "flops": step["flops"], "seconds": step_seconds, "device_seconds": device,
                "gap_seconds": None if device is None else step_seconds - device,
                "bandwidth_bytes_per_second": self.bandwidth,
                "share_of_bandwidth": step["bytes"] / step_seconds / self.bandwidth}

    def _measure_bandwidth(self) -> float:
        """Bytes/s: a CPU reads, a GPU copies (both ways count)."""
        if not self._gpu:
            from relaxpack.env import num_threads

            return host_bandwidth(num_threads())
        import relaxpack.tvm_setup  # noqa: F401
        import tvm
        from relaxpack.runtime import cuda_memory

        size = min(_COPY_BYTES, cuda_memory.free_and_total()[1] // 64)
        one, other = (tvm.runtime.empty((size,), "uint8", self._runner.device) for _ in range(2))
        best = float("inf")
        for _ in range(8):
            cuda_memory.synchronize()
            begin = time.perf_counter()
            cuda_memory.copy_tensor(other, one, size)
            cuda_memory.synchronize()
            best = min(best, time.perf_counter() - begin)
        return 2 * size / best

    @property
    def _runner(self) -> Any:
        return self._loaded.runner

    def _device_seconds(self, batch: int, context: int) -> float | None:
        if not self._gpu:
            return self._kernel_sum(context) if batch == 1 else None
        from relaxpack.runtime import cuda_memory
        from relaxpack.runtime.step_plan import SequenceStep

        runner = self._runner
        each = -(-(context + _STEPS) // runner.page_size)
        if batch * each >= runner.num_pages:
            return None
        tables = [list(range(1 + i * each, 1 + (i + 1) * each)) for i in range(batch)]

        def run() -> float:
            cuda_memory.synchronize()
            begin = time.perf_counter()
            for k in range(_STEPS):
                runner.decode([SequenceStep([k + 1], context + k, pages, [0]) for pages in tables])
            cuda_memory.synchronize()
            return (time.perf_counter() - begin) / _STEPS
        return min(run() for _ in range(3))

    def _kernel_sum(self, context: int) -> float:
        from relaxpack.runtime.kernel_times import decode_kernel_times

        bundle = self._loaded.bundle
        names = {k["name"] for k in bundle.read_json(self._entry.explain)["kernels"] if k["source"] != "host"}
        return sum(seconds for _, seconds in decode_kernel_times(bundle.location, names, context))
