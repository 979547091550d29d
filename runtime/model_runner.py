"""Step plan → input tensors → library call → logits, on the CPU. Knows neither requests nor text, and does not sample.

A step in which every sequence computes one token and wants its logits runs `decode`; every other step runs `prefill`
over all sequences packed one behind the other.
"""

from __future__ import annotations

import numpy as np

from relaxpack.model_info import ModelInfo
from relaxpack.runtime.kv_cache.storage import allocate_host_pages, choose_num_pages, free_host_memory
from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from relaxpack.runtime.vm import Library, as_array, as_tensor


class CpuModelRunner:
    """A `runtime.step_plan.ModelRunner` over host memory."""

    def __init__(self, library: Library, info: ModelInfo, num_pages: int | None = None) -> None:
        self.info = info
        self.page_size, self.max_batch = info.page_size, info.max_batch
        self.prefill_chunk, self.max_context = info.prefill_chunk, info.max_context
        self.vocab_size = info.vocab_size
        self.num_pages = choose_num_pages(info, free_host_memory(), num_pages)
        self._library = library
        self._pages = allocate_host_pages(info, self.num_pages)
        self._pages_tensor = as_tensor(self._pages)
        self._decode_inputs: dict[int, _DecodeInputs] = {}

    def forward(self, plan: StepPlan) -> np.ndarray:
        """float32 [total logit rows, vocab_size], rows in plan order. The array is the caller's."""
        for source, destination in plan.copies:
            self._pages[:, destination] = self._pages[:, source]
        sequences = plan.sequences
        if all(len(s.token_ids) == 1 and len(s.logit_offsets) == 1 for s in sequences):
            return self._decode(sequences)
        return self._prefill(sequences)

    def _decode(self, sequences: tuple[SequenceStep, ...]) -> np.ndarray:
        inputs = self._decode_inputs.get(len(sequences))
        if inputs is None:
            inputs = _DecodeInputs(len(sequences), self.info)
            self._decode_inputs[len(sequences)] = inputs
        inputs.fill(sequences, self.page_size)
        return as_array(self._library.call("decode", [*inputs.tensors, self._pages_tensor]))

    def _prefill(self, sequences: tuple[SequenceStep, ...]) -> np.ndarray:
        counts = [len(s.token_ids) for s in sequences]
        query_start = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        token_ids = np.empty(query_start[-1], np.int32)
        positions, slots = np.empty_like(token_ids), np.empty_like(token_ids)
        lengths = np.array([s.start + n for s, n in zip(sequences, counts, strict=True)], np.int32)
        page_table = np.zeros((len(sequences), self.info.max_pages_per_sequence), np.int32)
        rows: list[int] = []
        for i, (s, n) in enumerate(zip(sequences, counts, strict=True)):
            part = slice(query_start[i], query_start[i + 1])
            token_ids[part] = s.token_ids
            where = np.arange(s.start, s.start + n)
            positions[part] = where
            used = -(-int(lengths[i]) // self.page_size)
            page_table[i, :used] = s.page_ids[:used]
            slots[part] = page_table[i, where // self.page_size] * self.page_size + where % self.page_size
            rows += [int(query_start[i]) + offset for offset in s.logit_offsets]
        # A chunk that wants no logits still needs one row: functions have no zero-sized results.
        logit_rows = np.array(rows or [0], np.int32)
        arrays = [token_ids, positions, slots, query_start, lengths, page_table, logit_rows]
        logits = as_array(self._library.call("prefill", [*map(as_tensor, arrays), self._pages_tensor]))
        return logits[:len(rows)]

    def read_pages(self, page_ids: list[int]) -> np.ndarray:
        """Copies of pages, [n, layers, 2, kv_heads, page_size, head_dim] of kv_dtype."""
        return np.ascontiguousarray(self._pages[:, page_ids].swapaxes(0, 1))

    def write_pages(self, page_ids: list[int], pages: np.ndarray) -> None:
        self._pages[:, page_ids] = pages.swapaxes(0, 1)


class _DecodeInputs:
    """The integer inputs of a decode step of one batch size, kept between steps: NumPy writes, TVM reads."""

    def __init__(self, batch: int, info: ModelInfo) -> None:
        shapes = [(batch,)] * 4 + [(batch, info.max_pages_per_sequence)]
        self._arrays = [_aligned(shape) for shape in shapes]
        self.tensors = [as_tensor(array) for array in self._arrays]

    def fill(self, sequences: tuple[SequenceStep, ...], page_size: int) -> None:
        token_ids, positions, slots, lengths, page_table = self._arrays
        for i, s in enumerate(sequences):
            token_ids[i] = s.token_ids[0]
            positions[i] = s.start
            lengths[i] = s.start + 1
            slots[i] = s.page_ids[s.start // page_size] * page_size + s.start % page_size
            used = s.start // page_size + 1
            page_table[i, :used] = s.page_ids[:used]


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    size = int(np.prod(shape)) * 4
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start:start + size].view(np.int32).reshape(shape)
