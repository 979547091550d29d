"""One target of a bundle: passes, code, parameters, and its entry in the manifest."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaxpack.compile.canaries import BuiltTarget
from relaxpack.compile.kernels import kernel_provider
from relaxpack.compile.lowering import Lowered, lower_model
from relaxpack.compile.options import BuildOptions, pipeline_config
from relaxpack.compile.progress import Progress, Stage
from relaxpack.compile.storage_summary import storage_summary
from relaxpack.compile.target_plan import TargetPlan
from relaxpack.compile.weights import ParameterMaker, fixed_weights, weight_bytes
from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.integrity import canonical_json
from relaxpack.dist.manifest import TargetEntry
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import KernelProvider
from relaxpack.passes.config import left_out
from relaxpack.recipe import Pack
from relaxpack.relax_models.checkpoint import Checkpoint
from relaxpack.relax_models.export import BuildLimits
from relaxpack.schedules.cuda_compile import check_library
from relaxpack.step_interface import STEP_INTERFACE

if TYPE_CHECKING:
    from relaxpack.tuning.lookup import DatabaseLookup

_LIBRARY_BYTES = 32 << 20  # room for code and object files, whose sizes are known too late


@dataclass(frozen=True)
class Built(BuiltTarget):
    """With what report, key and manifest need: `digests` of its parameters; `stored`, bytes by weight format without what
    another target stored."""

    lowered: Lowered
    digests: dict[str, str]
    stored: dict[str, int]


def lower_target(checkpoint: Checkpoint, plan: TargetPlan, limits: BuildLimits, options: BuildOptions,
                 provider: KernelProvider, *, dump: Path | None = None, progress: Callable[[str], None] = lambda stage: None,
                 records: DatabaseLookup | None = None, code: bool = True) -> Lowered:
    """Passes and code of one target. `dump`, `progress`, `records`, `code`: as for `lower_model`."""
    pipeline = dataclasses.replace(
        pipeline_config(plan.spec, limits, left_out(options.level, options.disabled_passes), options.generates),
        enabled=options.enabled_passes, fixed_weights=fixed_weights(checkpoint, plan.formats))
    return lower_model(checkpoint.config, limits, plan.spec, provider, plan.formats, plan.activation_dtype, plan.kv_dtype,
                       pipeline, dump, progress, options.generates, options.embeds, records, code)


def build_target(writer: BundleWriter, checkpoint: Checkpoint, plan: TargetPlan, limits: BuildLimits, options: BuildOptions,
                 dump: Path | None, shown: Progress, stage: Stage, records: DatabaseLookup | None) -> Built:
    """Library and parameters of one target, written. Raises CompileError where a pass, code generation or the linker
    fails."""
    provider = kernel_provider(plan.spec, records, limits, plan.activations)
    with stage("compile", 6):
        lowered = lower_target(checkpoint, plan, limits, options, provider, dump=dump, progress=shown.advance,
                               records=records)
    library = writer.scratch / f"{plan.spec.file_stem}.so"
    with stage("library", None):
        # Parameters of a further target may be those of the first.
        writer.require_space(_LIBRARY_BYTES + (0 if writer.members else lowered.parameter_bytes()))
        _export(lowered, library)
        if plan.spec.kind == "cuda":
            check_library(library)
        writer.add_file(f"lib/{library.name}", library)
    with stage("weights", len(lowered.parameters)):
        maker = ParameterMaker(checkpoint, provider)
        with writer.params(plan.spec.file_stem) as params:
            for p in lowered.parameters:
                array = maker.make(p.recipe, p.dtype)
                assert array.shape == p.shape, (p.name, array.shape, p.shape)
                params.add(p.name, {"": array})
                shown.advance(p.name)
    stem, shared = writer.placement(params)
    elsewhere = {name for names in params.shared.values() for name in names}
    stored: Counter[str] = Counter()
    for p in lowered.parameters:
        if p.name not in elsewhere:
            stored[p.recipe.format if isinstance(p.recipe, Pack) else "f32"] += p.bytes
    explain = "explain.json" if "explain.json" not in writer.members else f"explain/{plan.spec.file_stem}.json"
    writer.add_bytes(explain, canonical_json(_explanation(lowered)))
    return Built(plan, _target_entry(plan, lowered, stem, shared, explain), library, lowered, dict(params.digests),
                 dict(stored))


def least_bytes(checkpoint: Checkpoint, plans: Sequence[TargetPlan]) -> int:
    """What the bundle takes at least: targets of one kind with the same formats share their parameters."""
    different = {(plan.spec.kind, tuple(sorted((name, fmt.name) for name, fmt in plan.formats.items()))): plan
                 for plan in plans}
    return sum(weight_bytes(checkpoint, plan.formats) for plan in different.values()) + len(plans) * _LIBRARY_BYTES


def _export(lowered: Lowered, library: Path) -> None:
    """Link the library; what lies on the way to it stays in its folder."""
    try:
        lowered.executable.export_library(str(library), workspace_dir=str(library.parent))
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise CompileError(f"linking {library.name} failed: "
                           f"{(str(error).strip().splitlines() or [type(error).__name__])[-1]}") from error


def _explanation(lowered: Lowered) -> dict[str, Any]:
    """Without times, which differ from build to build and would make equal builds differ."""
    return {**lowered.explanation, **{
        kind: [{k: v for k, v in p.items() if k != "seconds"} for p in lowered.explanation[kind]]
        for kind in ("phases", "passes")}}


def _target_entry(plan: TargetPlan, lowered: Lowered, stem: str, shared: dict[str, tuple[str, ...]],
                  explain: str) -> TargetEntry:
    return TargetEntry(
        plan.spec, f"lib/{plan.spec.file_stem}.so", stem, tuple(p.name for p in lowered.parameters),
        lowered.functions, lowered.bounds, lowered.buckets,
        {"arena_bytes": lowered.arena_bytes(), "weight_bytes": lowered.parameter_bytes(),
         **storage_summary(lowered.explanation["memory_plan"])},
        lowered.kernel_counts(),
        tuning_records=tuple(lowered.explanation.get("tuning", {}).get("used", ())),
        activation_dtype=plan.activation_dtype, kv_dtype=plan.kv_dtype, shared_params=shared, explain=explain,
        libraries=_libraries(lowered), activations=plan.activations if plan.activations != "float" else None,
        spread={str(rows): asdict(costs) for rows, costs in lowered.spread.items()},
        step_interface=STEP_INTERFACE[plan.spec.kind])


def _libraries(lowered: Lowered) -> dict[str, Any]:
    """Libraries that kernels call, with the number of these kernels."""
    sources = [kernel["source"] for kernel in lowered.explanation["kernels"]]
    names = Counter(source.partition(":")[2] for source in sources if source.startswith("library:"))
    return {name: {"kernels": count} for name, count in sorted(names.items())}
