"""Step plan → one upload → one graph launch (decode) or a packed prefill, on an NVIDIA GPU. Returns logits or, with
sampling on the device, a handle of the sampled tokens.

A decode step is padded up to its bucket; padded rows point at the scratch page. Buckets are captured functions of the
library: TVM captures at the first call and replays after, so their input tensors are made once and never move. Steps
above the largest bucket, and prefills of several prompts, run the symbolic function eagerly and are counted.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import TOP_LOGPROBS, counts_width
from relaxpack.model_info import ModelInfo, page_dtype
from relaxpack.runtime import cuda_memory, step_inputs
from relaxpack.runtime.cuda_pages import PageTransfer
from relaxpack.runtime.device_plan import Comparison, DevicePlan, granted
from relaxpack.runtime.device_view import view
from relaxpack.runtime.kv_cache.storage import DEVICE_SHARE, choose_num_pages, page_bytes, page_shape
from relaxpack.runtime.spread import SPREAD, Chooser, Spread
from relaxpack.runtime.step_inputs import Arrays, InputLayout
from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from relaxpack.runtime.vm import Library
from relaxpack.spread_costs import SpreadCosts

FillSampling = Callable[[Arrays], int | None]   # writes rows of `settings` (float32 view), `counters` and, where there is
#                                                 one, `allowed`; says how many rows of that
_RING = 2                                # steps whose host memory may be in use at once
_COUNT_WRITES = 8                        # rows of counts on their way to the device at once


@dataclass(frozen=True)
class WarmUp:
    """`bytes`: what the driver says all graphs and the arena took; `arena`: the part that intermediates take."""

    graphs: int
    seconds: float
    bytes: int
    arena: int = 0

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return (f"captured {self.graphs} graphs in {self.seconds:.1f} s and {(self.bytes - self.arena) / 1e6:.0f} MB beside "
                f"the arena of {self.arena / 1e6:.0f} MB")


class SampledTokens:
    """Tokens that the device is still drawing; `result` waits for them."""

    def __init__(self, rows: int, staging: _Staging) -> None:
        self._rows, self._staging = rows, staging

    def result(self) -> tuple[list[int], list[float]]:
        """(token ids, log-probabilities); -1 where a row had no finite logits, -2 where nothing was allowed. Call it before
        the step after next."""
        self._staging.done.wait()
        drawn = self._staging.drawn.array[:self._rows]
        return drawn[:, 0].tolist(), drawn[:, 1].copy().view(np.float32).tolist()

    def tops(self) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest tokens of each row and their log-probabilities, where they were asked for. As `result`."""
        self._staging.done.wait()
        return self._staging.top_ids.array[:self._rows].tolist(), self._staging.top_logprobs.array[:self._rows].tolist()


class _Staging:
    """Host memory of one step in flight."""

    def __init__(self, inputs: int, rows: int) -> None:
        self.inputs = cuda_memory.PinnedArray((inputs,), np.int32)
        self.drawn = cuda_memory.PinnedArray((rows, 2), np.int32)
        self.top_ids = cuda_memory.PinnedArray((rows, TOP_LOGPROBS), np.int32)
        self.top_logprobs = cuda_memory.PinnedArray((rows, TOP_LOGPROBS), np.float32)
        self.uploaded, self.done = cuda_memory.Event(), cuda_memory.Event()


class CudaModelRunner:
    """A `runtime.step_plan.ModelRunner` over device memory. `buckets`: function → ascending sizes that have a captured
    function; `memory`: the manifest's plan of intermediates; `functions`: what the library exports; `weight_sizes`: bytes
    of each parameter; `free_before`: what the device had before the weights;
    `library_bytes`: workspace of libraries that kernels call; pages get what is left. `spread`: of the manifest."""

    def __init__(self, library: Library, info: ModelInfo, device: Any, buckets: Mapping[str, Sequence[int]],
                 num_pages: int | None = None, memory: Mapping[str, Any] = MappingProxyType({}),
                 functions: Collection[str] = ("prefill", "decode"), *, weight_sizes: Sequence[int] = (),
                 free_before: int | None = None, library_bytes: int = 0,
                 spread: Mapping[str, Mapping[str, float]] = MappingProxyType({})) -> None:
        self.info, self.device = info, device
        self.page_size, self.max_batch = info.page_size, info.max_batch
        self.prefill_chunk, self.max_context = info.prefill_chunk, info.max_context
        self.vocab_size, self.max_logit_rows = info.vocab_size, info.max_batch
        self.generates = "prefill" in functions
        self.embedding_size = info.hidden_size if "embed" in functions else 0
        self.buckets = {name: tuple(sizes) for name, sizes in buckets.items()}
        self.graph_steps: Counter[str] = Counter()    # by function: steps through a bucket
        self.eager_steps: Counter[str] = Counter()    # and steps that no bucket serves
        self._costs = {int(rows): SpreadCosts(**costs) for rows, costs in spread.items()}
        self._chooser = Chooser(info.page_size)
        self._library = library
        # The arena is taken at the first step, by the captured functions and once more by the eager ones.
        arena = int(memory.get("arena_bytes", 0))
        free_now, total = cuda_memory.free_and_total()
        self._free_before = free_now if free_before is None else free_before
        counts_shape = (self.max_batch if self.generates else 1, counts_width(self.vocab_size))
        count_bytes = 4 * counts_shape[0] * counts_shape[1]
        free = max(0, free_now - 2 * arena - count_bytes)
        self.num_pages = choose_num_pages(info, free, num_pages, DEVICE_SHARE)
        layers, *rest = page_shape(info)
        self._pages = self._zeros((layers, self.num_pages, *rest), page_dtype(info.kv_dtype))
        self._drawn = self._zeros((self.max_batch, 2), "int32")           # by the last step that sampled
        self._counts = self._zeros(counts_shape, "int32")
        self._count_writes = [(cuda_memory.PinnedArray((counts_shape[1],), np.int32), cuda_memory.Event())
                              for _ in range(_COUNT_WRITES if self.generates else 0)]
        self._count_write = 0
        widest = max(
            step_inputs.decode_layout(self.max_batch, info, True, shared=True).size,
            step_inputs.sampling_layout(self.max_batch, info).size,
            step_inputs.prefill_layout(self.prefill_chunk, self.max_batch, self.prefill_chunk, info).size)
        self._ring = [_Staging(widest, self.max_batch) for _ in range(_RING)]
        self._few_inputs = cuda_memory.QueuedArray((cuda_memory.QUEUED_BYTES // 4,), np.int32)
        self._inputs = self._zeros((widest,), "int32")
        self._host_rows = cuda_memory.PinnedArray((self.max_batch, max(self.vocab_size, info.hidden_size)), np.float32)
        self._views: dict[InputLayout, dict[str, Any]] = {}
        self._step = 0
        self._counters: Any = None      # of the step that is sampled last
        pages = self.num_pages * page_bytes(info)
        # In the order of their taking: what is small shares granules with what was small before.
        own = [8 * self.max_batch, count_bytes, 4 * widest, library_bytes]
        self.plan = DevicePlan(
            granted(weight_sizes), granted([pages]), granted(memory.get("arena_storages", [arena] if arena else [])),
            granted(own), int(memory.get("eager_bytes", 0)), self.num_pages, (self.num_pages - 1) * info.page_size, total)

    @property
    def library(self) -> Library:
        return self._library

    # -- what the engine calls ------------------------------------------------------------------------------------

    def forward(self, plan: StepPlan) -> np.ndarray:
        """float32 [total logit rows, vocab_size], rows in plan order. The array is the caller's."""
        return self._to_host(self.start(plan), step_inputs.count_logit_rows(plan.sequences))

    def start(self, plan: StepPlan) -> Any:
        """Start a step; its logits on the device, float32 [total logit rows or more, vocab_size], good until the next."""
        self._copy_pages(plan.copies)
        if step_inputs.is_decode(plan.sequences):
            return self.decode(plan.sequences, spread=self._spread(plan.sequences))[0]
        return self.prefill(plan.sequences)

    def read_rows(self, logits: Any, rows: Sequence[int]) -> np.ndarray:
        """Some rows of what `start` gave, on the host. Waits for them."""
        return np.concatenate([self._to_host(logits, 1, row) for row in rows])

    def forward_hidden(self, plan: StepPlan) -> np.ndarray:
        """float32 [total rows, embedding_size] after the final norm, rows in plan order. The array is the caller's."""
        self._copy_pages(plan.copies)
        rows = step_inputs.count_logit_rows(plan.sequences)
        return self._to_host(self._prompts("embed", plan.sequences, max(rows, 1)), rows)

    def forward_and_sample(self, plan: StepPlan, fill_sampling: FillSampling,
                           token_source: np.ndarray | None = None, tops: bool = False) -> SampledTokens:
        """Run a step and draw a token for each logit row on the device. `fill_sampling` writes the rows' settings.
        `token_source` (decode only): rows >= 0 take their input from that row of the last step that sampled. `tops`: find
        the likeliest tokens of each row as well."""
        self._copy_pages(plan.copies)
        rows = step_inputs.count_logit_rows(plan.sequences)
        if step_inputs.is_decode(plan.sequences):
            logits, _ = self.decode(plan.sequences, fill_sampling, token_source, self._spread(plan.sequences))
            return self._download(rows, logits if tops else None)
        return self.sample(self.prefill(plan.sequences), rows, fill_sampling, tops)

    def sample(self, logits: Any, rows: int, fill_sampling: FillSampling, tops: bool = False) -> SampledTokens:
        """Draw a token for each of the first rows of what `start` gave."""
        layout = step_inputs.sampling_layout(rows, self.info)
        arrays = self._stage(layout)
        masks = self._fill_sampling(arrays, fill_sampling)
        views = self._upload(layout, layout.offsets[-1] + masks * layout.shapes[-1][1])
        if logits.shape[0] != rows:
            logits = view(logits, (rows, self.vocab_size), "float32", 0)
        self._counters = views["counters"]
        self._library.call("sample", [
            logits, views["settings"], views["counters"], self._counts, self._drawn, views["allowed"]])
        return self._download(rows, logits if tops else None)

    def write_counts(self, row: int, first: int, count: int, fill: Callable[[np.ndarray], None]) -> None:
        """Start writing `count` words, which `fill` makes, of a row of counts (see `SamplingSpec`), from `first` on."""
        pinned, written = self._count_writes[self._count_write % _COUNT_WRITES]
        self._count_write += 1
        written.wait()
        fill(pinned.array[:count])
        cuda_memory.upload(self._counts, pinned, count * 4, (row * counts_width(self.vocab_size) + first) * 4)
        written.record()

    def _download(self, rows: int, logits: Any | None) -> SampledTokens:
        """`logits`: whose likeliest tokens are wanted too."""
        staging = self._ring[(self._step - 1) % _RING]
        cuda_memory.download(staging.drawn, self._drawn, rows * 8)
        if logits is not None:
            top_ids, top_logprobs = self._library.call("top_logprobs", [logits, self._counters])
            cuda_memory.download(staging.top_ids, top_ids, rows * TOP_LOGPROBS * 4)
            cuda_memory.download(staging.top_logprobs, top_logprobs, rows * TOP_LOGPROBS * 4)
        staging.done.record()
        return SampledTokens(rows, staging)

    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> WarmUp:
        """Capture every bucket, largest first, so that the first request pays for none. `progress`: buckets done and in
        all."""
        todo = [(function, size) for function in ("decode", SPREAD, "prefill")
                for size in reversed(self.buckets.get(function, ()))]
        total = len(todo)
        free, begin = cuda_memory.free_and_total()[0], time.perf_counter()
        for done, (function, size) in enumerate(todo, 1):
            if function == "prefill":
                pages = [0] * -(-size // self.page_size)
                self.prefill([SequenceStep([0] * size, 0, pages, [size - 1])])
            else:
                self.decode([SequenceStep([0], 0, [0], [0])] * size, spread=Spread() if function == SPREAD else None)
            progress(done, total)
        cuda_memory.synchronize()
        self.graph_steps.clear()
        return WarmUp(total, time.perf_counter() - begin, free - cuda_memory.free_and_total()[0], self.plan.arena)

    def compare_plan(self) -> Comparison:
        """After `warm_up`: what was planned for the start against what the driver says."""
        return Comparison(self.plan.at_start, self._free_before - cuda_memory.free_and_total()[0])

    def read_pages(self, page_ids: Sequence[int]) -> np.ndarray:
        """Copies of pages, [n, layers, 2, kv_heads, page_size, head_dim]; 16-bit numbers as their bits."""
        return PageTransfer(self._pages, self.info, self.num_pages).read(page_ids)

    def write_pages(self, page_ids: Sequence[int], pages: np.ndarray) -> None:
        PageTransfer(self._pages, self.info, self.num_pages).write(page_ids, pages)

    # -- one step -------------------------------------------------------------------------------------------------

    def decode(self, sequences: Sequence[SequenceStep], fill_sampling: FillSampling | None = None,
               token_source: np.ndarray | None = None, spread: Spread | None = None) -> Any:
        """Start a decode step; (logits f32[bucket, V], what it drew i32[max_batch, 2]). `spread`: through the second graph
        of the bucket."""
        size, name = self._bucket(SPREAD if spread is not None else "decode", len(sequences))
        layout = step_inputs.decode_layout(size, self.info, True, spread is not None)
        arrays = self._stage(layout)
        step_inputs.fill_decode(arrays, sequences, self.page_size)
        if spread is not None:
            arrays["shared"][:] = 0
            arrays["shared"][list(spread.rows)] = spread.keys
        arrays["token_source"][:] = -1
        if token_source is not None:
            arrays["token_source"][:len(token_source)] = token_source
        self._fill_sampling(arrays, fill_sampling)
        views = self._upload(layout)
        self._counters = views["counters"]
        return self._library.call(name, [
            *(views[n] for n in ("token_ids", "positions", "slots", "lengths", "page_table", "token_source",
                                 "settings", "counters")), self._counts, self._drawn, self._pages,
            *([views["shared"]] if spread is not None else [])])

    def _spread(self, sequences: Sequence[SequenceStep]) -> Spread | None:
        """Whether the step takes the second graph of its bucket, and what that reads once."""
        at = bisect.bisect_left(sizes := self.buckets.get(SPREAD, ()), len(sequences))
        costs = self._costs.get(sizes[at]) if at < len(sizes) else None
        return self._chooser.choose(sequences, costs) if costs is not None else None

    def prefill(self, sequences: Sequence[SequenceStep]) -> Any:
        """Start a prefill; logits f32[rows, V] (at least one row)."""
        return self._prompts("prefill", sequences, max(step_inputs.count_logit_rows(sequences), 1))

    def _prompts(self, function: str, sequences: Sequence[SequenceStep], rows: int) -> Any:
        tokens = sum(len(s.token_ids) for s in sequences)
        # A graph is captured per (bucket, sequences, rows): only one prompt at a time keeps their number small.
        if len(sequences) == 1 and rows == 1:
            size, name = self._bucket(function, tokens)
        else:
            size, name = tokens, function
            self.eager_steps[function] += 1
        layout = step_inputs.prefill_layout(size, len(sequences), rows, self.info)
        step_inputs.fill_prefill(self._stage(layout), sequences, self.page_size)
        views = self._upload(layout)
        return self._library.call(name, [*(views[n] for n in layout.names), self._pages])

    def _bucket(self, function: str, size: int) -> tuple[int, str]:
        """(rows to run, function to call) for a number of rows."""
        sizes = self.buckets.get(function, ())
        at = bisect.bisect_left(sizes, size)
        if at == len(sizes):
            self.eager_steps[function] += 1
            return size, function
        self.graph_steps[function] += 1
        return sizes[at], f"{function}_{sizes[at]}"

    @staticmethod
    def _fill_sampling(arrays: Arrays, fill: FillSampling | None) -> int:
        """Rows that nobody fills are greedy. Number of masks."""
        arrays["settings"] = arrays["settings"].view(np.float32)
        arrays["settings"][:] = (0, 1, 0, 1, 0, 0, 1, 0)
        arrays["counters"][:] = (0, 0, 0, 0, -1, -1, 0, 0)
        return (fill(arrays) if fill is not None else 0) or 0

    # -- memory ---------------------------------------------------------------------------------------------------

    def _zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        tensor = tvm.runtime.empty(shape, dtype, self.device)
        cuda_memory.fill_zero(tensor, int(np.prod(shape)) * tensor.dtype.itemsize)
        return tensor

    def _stage(self, layout: InputLayout) -> Arrays:
        """Host arrays for the next upload, free to be written."""
        if layout.size <= self._few_inputs.array.size:
            return layout.views(self._few_inputs.array)
        staging = self._ring[self._step % _RING]
        staging.uploaded.wait()
        return layout.views(staging.inputs.array)

    def _upload(self, layout: InputLayout, size: int | None = None) -> dict[str, Any]:
        """`size`: elements to upload, all by default."""
        staging, size = self._ring[self._step % _RING], layout.size if size is None else size
        if layout.size <= self._few_inputs.array.size:
            cuda_memory.upload(self._inputs, self._few_inputs, size * 4)
        else:
            cuda_memory.upload(self._inputs, staging.inputs, size * 4)
            staging.uploaded.record()
        self._step += 1
        return self._device_views(layout)

    def _device_views(self, layout: InputLayout) -> dict[str, Any]:
        """Views of the device's input buffer; those of captured functions are kept, for a graph knows addresses."""
        if layout in self._views:
            return self._views[layout]
        views = {name: view(self._inputs, shape, "float32" if name == "settings" else "int32", start * 4)
                 for name, shape, start in zip(layout.names, layout.shapes, layout.offsets, strict=True)}
        if "query_start" not in layout.names or layout.shapes[0][0] in self.buckets.get("prefill", ()):
            self._views[layout] = views
        return views

    def _to_host(self, tensor: Any, rows: int, start: int = 0) -> np.ndarray:
        """Some consecutive rows of a float32 tensor."""
        width = int(tensor.shape[1])
        result = np.empty((rows, width), np.float32)
        buffer = self._host_rows.array.reshape(-1)
        at_once = len(buffer) // width
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            cuda_memory.download(self._host_rows, tensor, count * width * 4, (start + first) * width * 4)
            cuda_memory.synchronize()
            result[first:first + count] = buffer[:count * width].reshape(count, width)
        return result

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        size = page_bytes(self.info) // self.info.num_layers
        for source, destination in copies:
            cuda_memory.copy_within(self._pages, source * size, destination * size, size, size * self.num_pages,
                                    self.info.num_layers)
