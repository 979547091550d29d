"""The chain of a model's decode function, read off the module in which passes have put kernels into place: the same kernels
in the same order on the same values as in a build, without what stands before and behind the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.kernel_spec import Kernel, NormSpec, Stage
from relaxpack.passes.rewrite import is_op
from relaxpack.schedules.tuning.family import KernelFamily
from relaxpack.tuning.candidates import family_for
from relaxpack.tuning.chain import Chain, ChainCall
from relaxpack.tuning.specs import as_asked
from relaxpack.tuning_record import Workload
from tvm import relax

MOST_LAYERS = 16             # of records' attention (cuda_spaces)
Question = tuple[str, Any, Kernel]


def layer_chain(module: tvm.IRModule, rows: int, asked: Sequence[Question],
                families: Mapping[str, KernelFamily]) -> Chain | None:
    """Of the decode function of exactly `rows` rows. A layer begins where keys and values are appended; the last one, which
    the head follows, is left out. None where there is no such function, only one layer, or a kernel in between that cannot
    be built by itself."""
    name = f"decode_{rows}"
    function = next((func for gv, func in module.functions_items() if gv.name_hint == name), None)
    if function is None:
        return None
    reader = _Reader(function, rows, asked, families)
    calls: list[ChainCall] = []
    layer, whole = -1, 0
    for work, buffers, begins in reader.calls():
        layer += begins
        if begins:
            whole = len(calls)
        if layer == MOST_LAYERS:
            break
        if layer >= 0:
            if work is None:
                break                                        # behind the last layer
            calls.append(ChainCall(work, buffers, layer))
    return Chain(name, rows, tuple(calls[:whole])) if whole else None


class _Reader:
    def __init__(self, function: Any, rows: int, asked: Sequence[Question], families: Mapping[str, KernelFamily]) -> None:
        self.function, self.families = function, families
        self.questions: dict[str, Question] = {}
        for operation, spec, kernel in asked:
            mine = not spec.many_rows if isinstance(spec, NormSpec) else getattr(spec, "max_rows", None) in (None, rows)
            if mine:
                self.questions.setdefault(kernel.stages[0].name, (operation, spec, kernel))
        self.values: dict[Any, str | tuple[str, ...]] = {}   # variable → its value, or those of its fields
        self.count = 0

    def calls(self) -> Iterator[tuple[Workload | None, tuple[tuple[str, str], ...], bool]]:
        """(work, or None for what is no kernel of a family, buffers, whether a layer begins with it) in order."""
        question: Question | None = None                     # whose stages come
        buffers: dict[str, str] = {}
        place = 0
        for binding in (binding for block in self.function.body.blocks for binding in block.bindings):
            var, value = binding.var, binding.value
            if is_op(value, "relax.call_tir") or is_op(value, "relax.call_tir_inplace"):
                if question is None:
                    question, buffers, place = self.questions.get(value.args[0].name_hint), {}, 0
                if question is None:
                    yield None, (), False
                    continue
                operation, spec, kernel = question
                self._stage(kernel.stages[place], buffers, var, value)
                place += 1
                if place == len(kernel.stages):
                    family = family_for(self.families, operation, spec)
                    work = None if family is None else as_asked(family.name, spec) or family.workload(spec)
                    kept = tuple((name, held) for name, held in buffers.items() if name not in kernel.temporaries)
                    yield work, kept, any("pages" in stage.inplace for stage in kernel.stages)
                    question = None
            elif isinstance(value, relax.TupleGetItem) and isinstance(held := self.values.get(value.tuple_value), tuple):
                self.values[var] = held[value.index]
            elif isinstance(value, relax.Tuple):
                self.values[var] = tuple(self._value("value", field) for field in value.fields)
            elif isinstance(value, relax.Var) and value in self.values:
                self.values[var] = self.values[value]
            else:
                yield None, (), False

    def _stage(self, stage: Stage, buffers: dict[str, str], var: Any, call: Any) -> None:
        """Adds what this stage of a kernel reads and writes."""
        for name, argument in zip(stage.inputs, call.args[1].fields, strict=True):
            if name != "layer":
                buffers.setdefault(name, self._value(name, argument))
        buffers |= {name: self._fresh(name) for name in stage.outputs}
        results = tuple(buffers[name] for name in (*stage.inplace, *stage.outputs))
        self.values[var] = results if len(results) > 1 else results[0]

    def _value(self, name: str, argument: Any) -> str:
        held = self.values.get(argument)
        if isinstance(held, str):
            return held
        self.values[argument] = value = self._fresh(name)
        return value

    def _fresh(self, name: str) -> str:
        self.count += 1
        return f"{name}/{self.count}"
