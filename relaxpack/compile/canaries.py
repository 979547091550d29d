"""Canaries at build: the prompts, the model that answers them here, and what each target of the bundle is held to.

A target that this machine can run answers for itself. For the others (a GPU's code, built where there is no GPU) the
answers come from a CPU: the bundle's own CPU target, or the same numbers lowered for this CPU in float32 and thrown away
after, where that is cheap. The same run watches for values that a float16 target could not hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaxpack.compile.progress import Stage
from relaxpack.compile.target_plan import TargetPlan
from relaxpack.compile.weights import FLOAT16_MAX, ParameterMaker, weight_bytes
from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.canary import CANARY, CanaryOrigin, CanarySet, foreign_tolerance, tolerance
from relaxpack.dist.compat import reasons_against
from relaxpack.dist.host import detect_host
from relaxpack.dist.manifest import TargetEntry
from relaxpack.dist.params import ParamsReader, ParamsWriter
from relaxpack.dist.store import FolderStore
from relaxpack.errors import CompileError, RelaxpackError
from relaxpack.model_info import FP8, ModelInfo
from relaxpack.passes.config import PipelineConfig
from relaxpack.target import parse_target
from relaxpack.weight_format import FORMATS

if TYPE_CHECKING:
    from relaxpack.relax_models.checkpoint import Checkpoint
    from relaxpack.relax_models.export import BuildLimits
    from relaxpack.runtime.model_runner import CpuModelRunner
    from relaxpack.runtime.value_range import Extreme

CANARY_TEXTS = {"plain": "The capital of France is", "code": "def fibonacci(n):\n    ",
                "unicode": "今日は、世界。 Grüße 👋"}
REFERENCE_BYTES = 4_000_000_000     # weights beyond this are not lowered a second time for a reference


@dataclass(frozen=True)
class BuiltTarget:
    """A target whose library and parameters are in the bundle; the library also lies at `library`."""

    plan: TargetPlan
    entry: TargetEntry
    library: Path


@dataclass(frozen=True)
class Recorded:
    """`entries`: the targets, each with its `canary`. `missing`: why there are no canaries, empty where there are."""

    entries: tuple[TargetEntry, ...]
    missing: str


@dataclass(frozen=True)
class _Witness:
    """A model that runs here and answers the prompts. `name`: of its target."""

    name: str
    plan: TargetPlan
    runner: Any


def record_canaries(writer: BundleWriter, built: Sequence[BuiltTarget], checkpoint: Checkpoint, info: ModelInfo,
                    limits: BuildLimits, functions: tuple[bool, bool], stage: Stage) -> Recorded:
    """Write canary.json, if any model of these weights runs here. `functions`: whether the model generates, and whether it
    embeds. Raises CompileError where a float16 target or e4m3 pages would overflow, and where the answers are not finite."""
    own = next((one for one in built if not reasons_against(one.plan.spec, detect_host())), None)
    halves = [one.plan.spec.name for one in built if one.plan.activation_dtype == "float16"]
    with stage("canaries", len(CANARY_TEXTS)):
        try:
            witness = _own(writer, own, info) if own else _reference(writer, checkpoint, built[0].plan, info, limits,
                                                                     functions)
        except _NotAffordable as reason:
            return Recorded(tuple(dataclasses.replace(one.entry, canary=CanaryOrigin(reason=str(reason)).to_json())
                                  for one in built), str(reason))
        canaries, extreme = _answers(witness, checkpoint, halves)
        if witness.plan.kv_dtype == FP8:
            _require_e4m3_range(witness, canaries)
        if extreme is not None and extreme.value > FLOAT16_MAX:
            raise CompileError(f"{', '.join(halves)}: activations do not fit into float16, which ends at 65504: {extreme}; "
                               "build with --dtype bfloat16")
        writer.add_bytes(CANARY, canaries.to_bytes())
    return Recorded(tuple(dataclasses.replace(one.entry, canary=_origin(one.plan, witness).to_json()) for one in built), "")


def _require_e4m3_range(witness: _Witness, canaries: CanarySet) -> None:
    from relaxpack.runtime.value_range import beyond_e4m3

    if beyond := beyond_e4m3(witness.runner, canaries):
        raise CompileError(f"{beyond} do not fit into fp8, which ends at 448: build without --kv-dtype fp8")


def _origin(plan: TargetPlan, witness: _Witness) -> CanaryOrigin:
    formats = {fmt.name for fmt in witness.plan.formats.values()}
    if plan.spec.name == witness.name:
        return CanaryOrigin(witness.name, tolerance(formats, plan.activation_dtype, plan.kv_dtype))
    return CanaryOrigin(witness.name, foreign_tolerance(formats, plan.activation_dtype, plan.kv_dtype))


class _NotAffordable(Exception):
    """No reference is made, for the reason that is said."""


def _own(writer: BundleWriter, one: BuiltTarget, info: ModelInfo) -> _Witness:
    from relaxpack.runtime.load import make_runner

    parameters = writer.open_params(one.entry)
    here = dataclasses.replace(info, activation_dtype=one.plan.activation_dtype, kv_dtype=one.plan.kv_dtype)
    runner = make_runner(one.library, one.entry, here, [parameters[name] for name in one.entry.param_order])
    return _Witness(one.plan.spec.name, one.plan, runner)


def _reference(writer: BundleWriter, checkpoint: Checkpoint, target: TargetPlan, info: ModelInfo, limits: BuildLimits,
               functions: tuple[bool, bool]) -> _Witness:
    """The weights of a target for this CPU, in the writer's scratch folder. Quantised ones are unpacked, for with them a CPU
    would round activations. Raises _NotAffordable."""
    from relaxpack.compile.lowering import lower_model
    from relaxpack.runtime.load import make_runner
    from relaxpack.schedules.kernels.cpu.provider import CpuKernels

    formats = {name: FORMATS["f16"] if fmt.quantized else fmt for name, fmt in target.formats.items()}
    plan = TargetPlan(parse_target("cpu"), "float32", FP8 if target.kv_dtype == FP8 else "float32", formats)
    size = weight_bytes(checkpoint, formats)
    if size > REFERENCE_BYTES:
        raise _NotAffordable(f"no target runs on the machine that built it, and a CPU reference of {size / 1e9:.1f} GB is "
                             "not made")
    if reasons := reasons_against(plan.spec, detect_host()):
        raise _NotAffordable(f"no target runs on the machine that built it, and this CPU cannot: {reasons[0]}")
    folder = writer.scratch / "reference"
    try:
        writer.require_space(size)
        provider = CpuKernels(plan.spec)
        lowered = lower_model(checkpoint.config, limits, plan.spec, provider, plan.formats, plan.activation_dtype,
                              plan.kv_dtype, PipelineConfig(), None, lambda stage: None, *functions)
    except RelaxpackError as error:     # the bundle is whole without canaries
        raise _NotAffordable(f"no target runs on the machine that built it, and a CPU reference cannot be made: {error}"
                             ) from error
    folder.mkdir()
    library = folder / "reference.so"
    lowered.executable.export_library(str(library), workspace_dir=str(folder))
    params = ParamsWriter(folder, "reference", writer.require_space)
    maker = ParameterMaker(checkpoint, provider, target.formats)
    for p in lowered.parameters:
        params.add(p.name, {"": maker.make(p.recipe, p.dtype)})
    params.close()
    reader = ParamsReader(FolderStore(folder), params.members)
    entry = TargetEntry(plan.spec, "lib/reference.so", "reference", tuple(params.names), lowered.functions, lowered.bounds)
    here = dataclasses.replace(info, activation_dtype=plan.activation_dtype, kv_dtype=plan.kv_dtype)
    return _Witness(plan.spec.name, plan, make_runner(library, entry, here, [reader[name] for name in params.names]))


def _answers(witness: _Witness, checkpoint: Checkpoint, halves: Sequence[str]) -> tuple[CanarySet, Extreme | None]:
    """Also the largest activation, where `halves` (names of float16 targets) want to know it."""
    from relaxpack.runtime.canaries import record

    formats = {fmt.name for fmt in witness.plan.formats.values()}
    allowed = tolerance(formats, witness.plan.activation_dtype, witness.plan.kv_dtype)
    found = prompts(checkpoint, witness.runner.max_context)
    if not halves or witness.plan.spec.kind != "cpu":     # a GPU's own numbers are float16 and checked for being finite
        return record(witness.runner, found, allowed), None
    from relaxpack.runtime.value_range import watch_values

    runner: CpuModelRunner = witness.runner
    with watch_values(runner) as watched:
        canaries = record(runner, found, allowed)
    return canaries, watched.extreme


def prompts(checkpoint: Checkpoint, max_context: int) -> Mapping[str, Sequence[int]]:
    """Token ids by name, cut to half of the context."""
    import tokenizers

    encode = tokenizers.Tokenizer.from_str(checkpoint.assets.files["tokenizer.json"].decode())
    return {name: ids[:max_context // 2] for name, text in CANARY_TEXTS.items()
            if (ids := encode.encode(text, add_special_tokens=False).ids)}
