"""Which work of a model is worth tuning: its kernels at given numbers of rows, weighted by their share of a step.

The passes run as for a build, without generating code. A step's time is predicted by the roofline, kernel by kernel;
every step asked for (a function at a number of rows) counts the same.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from relaxpack.compile import BuildOptions
from relaxpack.compile.kernels import attention_spec, kernel_provider
from relaxpack.compile.options import build_limits, pipeline_config
from relaxpack.compile.target_plan import plan_targets
from relaxpack.errors import UsageError
from relaxpack.kernel_spec import MANY_ROWS, AttentionSpec, Kernel, KernelProvider, NormSpec
from relaxpack.passes.config import left_out
from relaxpack.passes.pipeline import phases, run_phases
from relaxpack.passes.step_table import step_table
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.relax_models.export import export_model
from relaxpack.schedules.rest import rest_rule
from relaxpack.schedules.tuning.family import KernelFamily, Part
from relaxpack.schedules.tuning.space import ListedSpace
from relaxpack.step_costs import KernelCost, Machine, machine_for, step_costs
from relaxpack.target import TargetSpec
from relaxpack.tuning.candidates import families_for, family_for
from relaxpack.tuning.cases import CONTEXTS
from relaxpack.tuning.chain import Chain
from relaxpack.tuning.layer_chain import layer_chain
from relaxpack.tuning.rest import static_workload
from relaxpack.tuning.specs import as_asked
from relaxpack.tuning_record import Workload

DEFAULTS = BuildOptions()
# What a kernel with a norm inside must gain: here it follows itself, and its rule was chosen in chains of whole layers
# (docs/kernels_cuda.md).
FOLDED_GAIN = 0.03
_NUMBER = "relaxpack.workload"   # attribute of a function: its place among those that may be tuned


@dataclass(frozen=True)
class Step:
    """One function at a number of rows, e.g. decode at 8."""

    function: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.function}:{self.rows}"


@dataclass
class Task:
    """`weight`: share of the steps' time, out of 1. `roofline_us`: no call can be faster."""

    kernel: str
    workload: Workload
    bucket: int | None             # rows; None: a PrimFunc of constant shapes
    weight: float
    roofline_us: float
    part: Part | None              # None: a PrimFunc that is tuned by TVM's MetaSchedule
    shape: str
    calls: dict[str, int] = field(default_factory=dict)    # step → calls in it
    asked: Workload | None = None  # what is measured, where the build has more in this kernel than the record says
    least_gain: float = 0.0        # what counts as one, besides the rule of noise
    chain: Chain | None = None     # whole layers of its step, by which a GPU's kernel is judged

    @property
    def name(self) -> str:
        return f"{self.kernel}@{self.bucket}" if self.bucket is not None else self.kernel

    @property
    def work(self) -> Workload:
        """What is built, checked and timed."""
        return self.asked or self.workload


def asked(provider: KernelProvider) -> list[tuple[str, Any, Kernel]]:
    """Operation, spec and answer of every question that a provider of ours was asked."""
    questions = getattr(provider, "asked", None)
    return list(questions()) if questions is not None else []


def parse_step(text: str) -> Step:
    """"decode:8" → Step. Raises UsageError."""
    function, _, rows = text.partition(":")
    if function not in ("decode", "prefill") or not rows.isdigit() or int(rows) < 1:
        raise UsageError(f"--bucket {text!r}: expected decode:ROWS or prefill:ROWS, for example decode:8")
    return Step(function, int(rows))


def default_steps(max_batch: int, prefill_chunk: int) -> list[Step]:
    return [Step("decode", rows) for rows in sorted({1, max_batch})] + [Step("prefill", prefill_chunk)]


def extract_tasks(model: str | Path, target: TargetSpec, options: BuildOptions = DEFAULTS,
                  steps: Sequence[Step] = (), only: str | None = None, machine: Machine | None = None) -> list[Task]:
    """The tasks of a model, heaviest first. `only`: a pattern with * for kernel names, or a part of one."""
    checkpoint = open_checkpoint(model, ignore_keys=options.ignore_config_keys, pretokenizer=options.pretokenizer)
    limits = build_limits(checkpoint, options)
    plan, = plan_targets([target], checkpoint, options.weights, options.activation_dtype, options.kv_dtype)
    provider = kernel_provider(target)
    pipeline = pipeline_config(target, limits, left_out(options.level, options.disabled_passes))
    attention = attention_spec(checkpoint.config, limits, plan.activation_dtype, plan.kv_dtype)
    module = export_model(checkpoint.config, limits, plan.activation_dtype, plan.kv_dtype, target.kind == "cuda")
    rest: list[Workload] = []
    until = [phase for phase in phases(provider, attention, plan.formats, pipeline, _remembering(rest_rule(target), rest))
             if phase[0] != "finalize"]
    module = run_phases(module, target.to_tvm(), until)
    steps = list(steps) or default_steps(limits.max_batch, limits.prefill_chunk)
    for step in steps:
        most = limits.max_batch if step.function == "decode" else limits.prefill_chunk
        if step.rows > most:
            raise UsageError(f"--bucket {step.name}: a {step.function} step has at most {most} rows; raise "
                             f"--{'max-batch' if step.function == 'decode' else 'prefill-chunk'}")
    machine = machine or machine_for(target.kind, target.arch, target.features)
    families = families_for(target)
    questions: dict[str, list[tuple[str, Any, bool]]] = {}
    for operation, spec, kernel in asked(provider):
        if target.kind == "cpu" and isinstance(spec, AttentionSpec) and spec.fp8:
            continue        # cases for CPUs hold no e4m3 pages
        for stage in kernel.stages:
            questions.setdefault(stage.name, []).append((operation, spec, stage is kernel.stages[0]))
    functions = {gv.name_hint: rest[int(func.attrs[_NUMBER])] for gv, func in module.functions_items()
                 if _NUMBER in (func.attrs or {})}
    tasks = _tasks(step_table(module), steps, functions, questions, families, machine,
                   any("vnni" in feature for feature in target.features))
    if target.kind == "cuda":
        known = asked(provider)
        for rows in sorted({step.rows for step in steps if step.function == "decode"}):
            if (chain := layer_chain(module, rows, known, families)) is not None:
                for task in tasks:
                    if task.work.hash in chain.works() and task.bucket == rows:
                        task.chain = chain
    if only is not None:
        pattern = only if "*" in only else f"*{only}*"
        chosen = [task for task in tasks if fnmatch.fnmatchcase(task.kernel, pattern)]
        if not chosen:
            names = ", ".join(sorted({task.kernel for task in tasks})) or "none"
            raise UsageError(f"--only {only!r}: no kernel that can be tuned has such a name; they are: {names}")
        tasks = chosen
    return sorted(tasks, key=lambda task: (-task.weight, task.name))


def without_libraries(tasks: Sequence[Task]) -> list[Task]:
    """The same tasks with kernels of ours alone: a bundle that calls a library needs it where it runs."""
    def own(part: Part | None) -> Part | None:
        if part is None or not isinstance(part.space, ListedSpace):
            return part
        kept = tuple(choice for choice in part.space.choices if "library" not in choice)
        return replace(part, space=replace(part.space, choices=kept))

    return [replace(task, part=own(task.part)) for task in tasks]


def roofline_us(cost: KernelCost, family: str, machine: Machine, vnni: bool) -> float:
    """Microseconds that no schedule can beat. The machine's peak is that of float32 multiply-adds; byte dot products do
    twice, with VNNI four times as many."""
    faster = {True: 4, False: 2}[vnni] if family == "cpu.linear_quantized" else 1
    return max(cost.bytes / machine.bandwidth, cost.flops / (machine.peak * faster)) * 1e6


def _remembering(rule: Callable[[Any], Any | None], found: list[Workload]) -> Callable[[Any], Any | None]:
    """`rule`, with the functions of constant shapes noted: in `found`, and by their number in an attribute."""
    def noting(func: Any) -> Any | None:
        workload, scheduled = static_workload(func), rule(func)
        if workload is None:
            return scheduled
        found.append(workload)
        return (scheduled if scheduled is not None else func).with_attr(_NUMBER, len(found) - 1)

    return noting


def _of_step(spec: Any, step: Step) -> bool:
    if isinstance(spec, NormSpec):
        return spec.many_rows == (step.function == "prefill" and step.rows >= MANY_ROWS)
    return getattr(spec, "max_rows", None) in (None, step.rows)


def _tasks(table: Mapping[str, Sequence[Mapping[str, Any]]], steps: Sequence[Step], functions: Mapping[str, Workload],
           questions: Mapping[str, Sequence[tuple[str, Any, bool]]], families: Mapping[str, KernelFamily], machine: Machine,
           vnni: bool) -> list[Task]:
    """`functions`: PrimFuncs of TVM's by name; `questions`: what the provider was asked, by kernel (on a GPU one
    may answer for several numbers of rows), and whether that is the first of several that answer it. Their costs add up."""
    tasks: dict[tuple[str, int | None], Task] = {}
    context = round(fmean(CONTEXTS))
    for step in steps:
        behind = context if step.function == "decode" else 0
        bucket = f"{step.function}_{step.rows}"     # on a GPU; larger batches run the function of any size
        function = bucket if bucket in table else step.function
        calls = table.get(function, ())
        costs = step_costs(calls, {}, machine, step.rows, behind or step.rows)
        total = sum(cost.seconds for cost in costs) or 1.0
        for call, cost in zip(calls, costs, strict=True):
            if (workload := functions.get(cost.kernel)) is not None:
                task = tasks.setdefault((workload.hash, None), Task(cost.kernel, workload, None, 0.0, cost.seconds * 1e6,
                                                                    None, cost.shape))
                task.weight += cost.seconds / total / len(steps)
                task.calls[step.name] = task.calls.get(step.name, 0) + 1
            if cost.kernel not in questions:
                continue
            operation, spec, first = next((one for one in questions[cost.kernel] if _of_step(one[1], step)),
                                          questions[cost.kernel][0])
            rows = call["rows"] if isinstance(call["rows"], int) and first else 1 if call["rows"] == "r" else step.rows
            rows = getattr(spec, "max_rows", None) or rows
            family = family_for(families, operation, spec)
            part = family.part(spec, rows) if family is not None else None
            if family is None or part is None:
                continue
            task = tasks.setdefault((family.workload(spec).hash, rows), Task(
                cost.kernel, family.workload(spec, cost.kernel), rows, 0.0, roofline_us(cost, family.name, machine, vnni),
                part, cost.shape))
            if task.asked is None and (asked := as_asked(family.name, spec)) is not None:
                task.asked, task.least_gain, task.part = asked, FOLDED_GAIN, part
            task.weight += cost.seconds / total / len(steps)
            task.calls[step.name] = task.calls.get(step.name, 0) + first
    return list(tasks.values())
