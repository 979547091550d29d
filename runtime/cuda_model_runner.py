"""Step plan → one upload → one graph launch (decode) or a packed prefill → logits, on an NVIDIA GPU.

A decode step is padded up to its bucket; padded rows point at the scratch page. Buckets are captured functions of the
library: TVM captures at the first call and replays after, so their input tensors are made once and never move. Steps
above the largest bucket run the symbolic function eagerly and are counted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.model_info import ModelInfo
from relaxpack.runtime import cuda_memory, step_inputs
from relaxpack.runtime.kv_cache.storage import choose_num_pages, page_bytes, page_shape
from relaxpack.runtime.step_inputs import InputLayout
from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from relaxpack.runtime.vm import Library


def upload_parameters(parameters: Iterable[np.ndarray], device: Any) -> list[Any]:
    """Device tensors of the parameters, one after the other; bfloat16 travels as its bits."""
    tensors = []
    for array in parameters:
        tensor = tvm.runtime.empty(array.shape, array.dtype.name, device)
        if array.dtype.name == "bfloat16":
            tensor._create_view(array.shape, "uint16").copyfrom(array.view(np.uint16))
        else:
            tensor.copyfrom(array)
        tensors.append(tensor)
    return tensors


class CudaModelRunner:
    """A `runtime.step_plan.ModelRunner` over device memory. `buckets`: ascending batch sizes with a captured function;
    `graphs` False runs every step eagerly through the symbolic functions (for debugging)."""

    def __init__(self, library: Library, info: ModelInfo, device: Any, buckets: Sequence[int],
                 num_pages: int | None = None, graphs: bool = True) -> None:
        self.info, self.device = info, device
        self.page_size, self.max_batch = info.page_size, info.max_batch
        self.prefill_chunk, self.max_context = info.prefill_chunk, info.max_context
        self.vocab_size = info.vocab_size
        self.buckets = tuple(buckets) if graphs else ()
        self.eager_decode_steps = 0
        self.graph_decode_steps = 0
        self._library = library
        free, _ = cuda_memory.free_and_total()
        self.num_pages = choose_num_pages(info, free, num_pages)
        layers, *rest = page_shape(info)
        self._pages = tvm.runtime.empty((layers, self.num_pages, *rest), info.kv_dtype, device)
        cuda_memory.fill_zero(self._pages, page_bytes(info) * self.num_pages)
        widest = max(
            step_inputs.decode_layout(self.max_batch, info).size,
            step_inputs.prefill_layout(self.prefill_chunk, self.max_batch, self.prefill_chunk, info).size)
        self._staging = cuda_memory.PinnedArray((widest,), np.int32)
        self._inputs = tvm.runtime.empty((widest,), "int32", device)
        self._logits = cuda_memory.PinnedArray((self.max_batch, self.vocab_size), np.float32)
        self._views: dict[InputLayout, list[Any]] = {}

    def forward(self, plan: StepPlan) -> np.ndarray:
        """float32 [total logit rows, vocab_size], rows in plan order. The array is the caller's."""
        self._copy_pages(plan.copies)
        if step_inputs.is_decode(plan.sequences):
            return self._to_host(self._decode(plan.sequences), len(plan.sequences))
        return self._to_host(self._prefill(plan.sequences), step_inputs.count_logit_rows(plan.sequences))

    def _decode(self, sequences: Sequence[SequenceStep]) -> Any:
        size, name = self._bucket(len(sequences))
        layout = step_inputs.decode_layout(size, self.info)
        step_inputs.fill_decode(layout.views(self._staging.array), sequences, self.page_size)
        return self._run(name, layout)

    def _bucket(self, batch: int) -> tuple[int, str]:
        """(rows to run, function) for a batch."""
        at = bisect.bisect_left(self.buckets, batch)
        if at == len(self.buckets):
            self.eager_decode_steps += 1
            return batch, "decode"
        self.graph_decode_steps += 1
        return self.buckets[at], f"decode_{self.buckets[at]}"

    def _prefill(self, sequences: Sequence[SequenceStep]) -> Any:
        rows = step_inputs.count_logit_rows(sequences)
        tokens = sum(len(s.token_ids) for s in sequences)
        layout = step_inputs.prefill_layout(tokens, len(sequences), max(rows, 1), self.info)
        step_inputs.fill_prefill(layout.views(self._staging.array), sequences, self.page_size)
        return self._run("prefill", layout)

    def _run(self, name: str, layout: InputLayout) -> Any:
        cuda_memory.upload(self._inputs, self._staging, layout.size * 4)
        return self._library.call(name, [*self._tensors(layout), self._pages])

    def _tensors(self, layout: InputLayout) -> list[Any]:
        """Views of the device's input buffer; those of captured functions are kept, for a graph knows addresses."""
        if layout in self._views:
            return self._views[layout]
        views = [self._inputs._create_view(shape, "int32", start * 4)
                 for shape, start in zip(layout.shapes, layout.offsets, strict=True)]
        if "query_start" not in layout.names:
            self._views[layout] = views
        return views

    def _to_host(self, logits: Any, rows: int) -> np.ndarray:
        result = np.empty((rows, self.vocab_size), np.float32)
        for first in range(0, rows, self.max_batch):
            count = min(self.max_batch, rows - first)
            part = logits._create_view((count, self.vocab_size), "float32", first * self.vocab_size * 4)
            cuda_memory.download(self._logits, part, count * self.vocab_size * 4)
            cuda_memory.synchronize()
            result[first:first + count] = self._logits.array[:count]
        return result

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        size = page_bytes(self.info) // self.info.num_layers
        for source, destination in copies:
            cuda_memory.copy_within(self._pages, source * size, destination * size, size, size * self.num_pages,
                                    self.info.num_layers)

    def warm_up(self) -> None:
        """Capture every bucket, smallest last, so that the first request pays for none."""
        for size in reversed(self.buckets):
            step = SequenceStep([0], 0, [0], [0])
            self._decode([step] * size)
        cuda_memory.synchronize()
        self.graph_decode_steps = 0
