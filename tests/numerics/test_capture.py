"""Captured steps on a machine without a GPU: the module that a GPU would capture runs through stand-ins of TVM's two graph
builtins. One region a step, the same bits as without graphs, and padding that touches nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import counts_width
from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime import step_inputs
from relaxpack.runtime.kernel_times import TimedAlone, _Largest
from relaxpack.runtime.step_plan import SequenceStep
from relaxpack.runtime.vm import Library
from tests.helpers import graph_stand_ins
from tests.helpers.captured_model import build

LIMITS = BuildLimits(64, max_batch=4, prefill_chunk=16, page_size=4)
BUCKETS = {"decode": (1, 2, 4), "prefill": (4, 8)}


class Runner:
    """The part of the GPU runner that is not memory: fixed input tensors per bucket, filled before each call."""

    def __init__(self, path: Path, parameters: list[Any], graphs: bool) -> None:
        self.log = graph_stand_ins.install()        # fresh caches: a library finds its builtins when it is opened
        self.library = Library(path, tvm.cpu(), parameters, graphs)
        self.pages = tvm.runtime.tensor(np.zeros((2, 20, 2, 2, 4, 8), np.float32))
        self.drawn = tvm.runtime.tensor(np.zeros((4, 2), np.int32))
        self.counts = tvm.runtime.tensor(np.zeros((1, counts_width(61)), np.int32))
        self.inputs: dict[str, tuple[dict[str, np.ndarray], list[Any]]] = {}

    def _tensors(self, name: str, layout: step_inputs.InputLayout) -> tuple[dict[str, np.ndarray], list[Any]]:
        if name not in self.inputs:
            buffer = np.zeros(layout.size, np.int32)
            arrays = layout.views(buffer)
            tensors = [tvm.runtime.tensor(a.view(np.float32) if n == "settings" else a) for n, a in arrays.items()]
            self.inputs[name] = arrays, tensors
        return self.inputs[name]

    def decode(self, size: int, sequences: list[SequenceStep], source: list[int] | None = None) -> list[np.ndarray]:
        layout = step_inputs.decode_layout(size, _Info, True)
        arrays, tensors = self._tensors(f"decode_{size}", layout)
        step_inputs.fill_decode(arrays, sequences, 4)
        arrays["token_source"][:] = -1
        arrays["counters"][:] = -1
        if source is not None:
            arrays["token_source"][:len(source)] = source
        for (name, array), tensor in zip(arrays.items(), tensors, strict=True):
            tensor.copyfrom(array.view(np.float32) if name == "settings" else array)
        by_name = dict(zip(layout.names, tensors, strict=True))
        order = ("token_ids", "positions", "slots", "lengths", "page_table", "token_source", "settings", "counters")
        out = self.library.call(f"decode_{size}", [*(by_name[n] for n in order), self.counts, self.drawn, self.pages])
        return [t.numpy().copy() for t in out]

    def prefill(self, size: int, sequence: SequenceStep) -> np.ndarray:
        layout = step_inputs.prefill_layout(size, 1, 1, _Info)
        arrays, tensors = self._tensors(f"prefill_{size}", layout)
        step_inputs.fill_prefill(arrays, [sequence], 4)
        for array, tensor in zip(arrays.values(), tensors, strict=True):
            tensor.copyfrom(array)
        return self.library.call(f"prefill_{size}", [*tensors, self.pages]).numpy().copy()


class _Info:
    max_pages_per_sequence = LIMITS.max_pages


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(library path, parameters, final module)."""
    model = build(tmp_path_factory.mktemp("capture"), LIMITS, BUCKETS)
    return model.path, model.parameters, model.final


def steps(runner: Runner) -> list[np.ndarray]:
    """A prefill and decodes in changing batches, tokens fed back on the device; all logits and tokens."""
    a, b = [1, 2, 3, 4, 5], [6, 7, 8, 9]
    out = [runner.prefill(8, SequenceStep([3, 1, 4, 1, 5, 9], 0, a, [5])),
           runner.prefill(4, SequenceStep([2, 6, 5], 0, b, [2]))]
    for k in range(4):
        out += runner.decode(2, [SequenceStep([k + 1], 6 + k, a, [0]), SequenceStep([k + 2], 3 + k, b, [0])])
    out += runner.decode(2, [SequenceStep([0], 10, a, [0]), SequenceStep([0], 7, b, [0])], source=[0, 1])
    out += runner.decode(1, [SequenceStep([7], 11, a, [0])])
    return out


def test_graphs_give_the_same_bits_and_one_launch_a_step(captured: Any) -> None:
    path, parameters, _ = captured
    plain = steps(Runner(path, parameters, graphs=False))
    runner = Runner(path, parameters, graphs=True)
    first = steps(runner)
    assert runner.log.count("capture") == 4 and runner.log.count("alloc") == 1
    runner.log.events.clear()
    runner.pages.copyfrom(np.zeros((2, 20, 2, 2, 4, 8), np.float32))
    again = steps(runner)
    launches = [kind for kind, _ in runner.log.events]
    assert launches == ["replay"] * 8       # two prefills and six decodes: one launch each, nothing else
    for one, two, three in zip(plain, first, again, strict=True):
        assert np.array_equal(one, two) and np.array_equal(one, three)


def test_each_bucket_is_one_region_with_every_kernel_inside(captured: Any) -> None:
    _, _, final = captured
    kernels = {gv.name_hint for gv, f in final.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}
    for function, sizes in BUCKETS.items():
        for size in sizes:
            body = final[f"{function}_{size}"].body
            calls = [b.value for block in body.blocks for b in block.bindings if isinstance(b.value, tvm.ir.Call)]
            outside = [c.op.name_hint for c in calls if isinstance(c.op, tvm.ir.GlobalVar) and c.op.name_hint in kernels
                       and not c.op.name_hint.startswith("shape_func")]
            text = final[f"{function}_{size}"].script()
            assert outside == [] and text.count("vm.builtin.cuda_graph.run_or_capture") == 1, (function, size, outside)


def test_padding_rows_write_no_live_page(captured: Any) -> None:
    path, parameters, _ = captured
    rng = np.random.default_rng(1)
    filled = rng.standard_normal((2, 20, 2, 2, 4, 8)).astype(np.float32)
    runner = Runner(path, parameters, graphs=True)
    runner.pages.copyfrom(filled)
    logits, *_ = runner.decode(4, [SequenceStep([5], 2, [3], [0])])     # three rows are padding
    after = runner.pages.numpy()
    changed = {int(p) for p in np.unique(np.argwhere(after != filled)[:, 1])}
    assert changed <= {0, 3}
    runner.pages.copyfrom(filled)
    alone, *_ = runner.decode(1, [SequenceStep([5], 2, [3], [0])])
    assert np.array_equal(alone[0], logits[0])
    runner.pages.copyfrom(filled)
    runner.prefill(8, SequenceStep([1, 2, 3], 0, [7], [2]))             # five tokens are padding
    after = runner.pages.numpy()
    assert {int(p) for p in np.unique(np.argwhere(after != filled)[:, 1])} <= {0, 7}


def test_a_token_from_the_device_equals_one_from_the_host(captured: Any) -> None:
    path, parameters, _ = captured
    runner = Runner(path, parameters, graphs=True)
    pages = [2, 3]
    _, drawn = runner.decode(1, [SequenceStep([9], 0, pages, [0])])
    fed, *_ = runner.decode(1, [SequenceStep([0], 1, pages, [0])], source=[0])
    given, *_ = runner.decode(1, [SequenceStep([int(drawn[0, 0])], 1, pages, [0])])
    assert np.array_equal(fed, given)


def test_kernels_of_a_captured_step_are_timed_one_by_one(captured: Any) -> None:
    """What `explain --measure` does on a GPU: the region runs as plain calls, each kernel is timed where the step first
    comes to it, and the step still gives its result."""
    path, parameters, final = captured
    names = {gv.name_hint for gv, f in final.functions_items() if isinstance(f, tvm.tirx.PrimFunc)
             and not gv.name_hint.startswith("shape_func")}
    runner = Runner(path, parameters, graphs=False)
    runner.decode(1, [SequenceStep([9], 0, [2, 3], [0])])
    seen = TimedAlone(names, runner.library, 0)
    runner.library.instrument(seen)
    logits, *_ = runner.decode(1, [SequenceStep([9], 0, [2, 3], [0])])
    order = [name for name, _ in seen.times]
    assert order[0] == "next_token_ids" and order[-1].startswith("sample") and set(order) <= names
    assert sum("attention" in name for name in order) == 2 and all(seconds > 0 for _, seconds in seen.times)
    assert np.isfinite(logits).all()


def test_what_flushes_the_caches_writes_to_nothing_of_the_step(captured: Any) -> None:
    path, parameters, final = captured
    names = {gv.name_hint for gv, f in final.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}
    runner = Runner(path, parameters, graphs=False)
    plain, *_ = runner.decode(1, [SequenceStep([9], 0, [2, 3], [0])])
    largest = _Largest(names, runner.library)
    runner.library.instrument(largest)
    runner.decode(1, [SequenceStep([9], 0, [2, 3], [0])])
    assert largest.bytes == 2 * 48 * 32 * 4                     # gate and up; pages are larger and no weight
    flush = largest.again()

    class Flushed(TimedAlone):
        def __call__(self, *given: Any) -> None:
            flush()
            super().__call__(*given)

    runner.library.instrument(Flushed(names, runner.library, 0))
    logits, *_ = runner.decode(1, [SequenceStep([9], 0, [2, 3], [0])])
    np.testing.assert_array_equal(logits, plain)


def test_head_and_sampling_in_one_kernel(captured: Any, tmp_path: Path) -> None:
    """FuseHeadSample changes no bit, in graphs and without, and what its kernel keeps is a parameter of all functions."""
    fused = build(tmp_path, LIMITS, BUCKETS, enabled=frozenset({"FuseHeadSample"}))
    assert fused.names.count("head_sample.arrived") == 1
    heads = [name for name, rows in fused.steps.items() if any(row["kernel"] == "arrive_61" for row in rows)]
    assert sorted(heads) == ["decode_1", "decode_2"]
    path, parameters, _ = captured
    for graphs in (False, True):
        for one, two in zip(steps(Runner(path, parameters, graphs)), steps(Runner(fused.path, fused.parameters, graphs)),
                            strict=True):
            np.testing.assert_array_equal(one, two)
