"""Step plan → input tensors → library call → logits, on the CPU. Knows neither requests nor text, and does not sample.

A step in which every sequence computes one token and wants its logits runs `decode`; every other step runs `prefill`
over all sequences packed one behind the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from relaxpack.model_info import ModelInfo
from relaxpack.runtime import step_inputs
from relaxpack.runtime.kv_cache.storage import allocate_host_pages, choose_num_pages, free_host_memory
from relaxpack.runtime.step_inputs import InputLayout
from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from relaxpack.runtime.vm import Library, as_array, as_tensor


class CpuModelRunner:
    """A `runtime.step_plan.ModelRunner` over host memory. `functions`: what the library exports."""

    def __init__(self, library: Library, info: ModelInfo, num_pages: int | None = None,
                 functions: Collection[str] = ("prefill", "decode")) -> None:
        self.info = info
        self.page_size, self.max_batch = info.page_size, info.max_batch
        self.prefill_chunk, self.max_context = info.prefill_chunk, info.max_context
        self.vocab_size = info.vocab_size
        self.generates = "prefill" in functions
        self.embedding_size = info.hidden_size if "embed" in functions else 0
        self.num_pages = choose_num_pages(info, free_host_memory(), num_pages)
        self._library = library
        self._pages = allocate_host_pages(info, self.num_pages)
        self._pages_tensor = as_tensor(self._pages)
        self._decode_inputs: dict[int, _Inputs] = {}

    @property
    def library(self) -> Library:
        return self._library

    def instrument(self, observe: Any) -> None:
        """See `Library.instrument`."""
        self._library.instrument(observe)

    def forward(self, plan: StepPlan) -> np.ndarray:
        """float32 [total logit rows, vocab_size], rows in plan order. The array is the caller's."""
        self._copy_pages(plan)
        if step_inputs.is_decode(plan.sequences):
            return self._decode(plan.sequences)
        return self._prompts("prefill", plan.sequences)

    def forward_hidden(self, plan: StepPlan) -> np.ndarray:
        """float32 [total rows, embedding_size] after the final norm, rows in plan order. The array is the caller's."""
        self._copy_pages(plan)
        return self._prompts("embed", plan.sequences)

    def _copy_pages(self, plan: StepPlan) -> None:
        for source, destination in plan.copies:
            self._pages[:, destination] = self._pages[:, source]

    def _decode(self, sequences: Sequence[SequenceStep]) -> np.ndarray:
        batch = len(sequences)
        if batch not in self._decode_inputs:
            self._decode_inputs[batch] = _Inputs(step_inputs.decode_layout(batch, self.info))
        inputs = self._decode_inputs[batch]
        step_inputs.fill_decode(inputs.arrays, sequences, self.page_size)
        return as_array(self._library.call("decode", [*inputs.tensors, self._pages_tensor]))

    def _prompts(self, function: str, sequences: Sequence[SequenceStep]) -> np.ndarray:
        rows = step_inputs.count_logit_rows(sequences)
        tokens = sum(len(s.token_ids) for s in sequences)
        inputs = _Inputs(step_inputs.prefill_layout(tokens, len(sequences), max(rows, 1), self.info))
        step_inputs.fill_prefill(inputs.arrays, sequences, self.page_size)
        return as_array(self._library.call(function, [*inputs.tensors, self._pages_tensor]))[:rows]

    def read_pages(self, page_ids: Sequence[int]) -> np.ndarray:
        """Copies of pages, [n, layers, 2, kv_heads, page_size, head_dim] of kv_dtype."""
        return np.ascontiguousarray(self._pages[:, page_ids].swapaxes(0, 1))

    def write_pages(self, page_ids: Sequence[int], pages: np.ndarray) -> None:
        self._pages[:, page_ids] = pages.swapaxes(0, 1)


class _Inputs:
    """Host memory for the integer inputs of a step: NumPy writes, TVM reads."""

    def __init__(self, layout: InputLayout) -> None:
        raw = np.zeros(layout.size + 16, np.int32)
        start = -raw.ctypes.data % 64 // 4
        self.arrays = layout.views(raw[start:start + layout.size])
        self.tensors = [as_tensor(self.arrays[name]) for name in layout.names]
