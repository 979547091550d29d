"""`build_bundle`: the story from a checkpoint to a bundle.

    open checkpoint → choose weight formats → for each target: export, passes, code, pack weights → canaries → bundle
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

from relaxpack.compile.canaries import record_canaries
from relaxpack.compile.kernels import named_machines, records_for, require_kernels
from relaxpack.compile.manifest import make_manifest, model_info
from relaxpack.compile.one_target import Built, build_target, least_bytes
from relaxpack.compile.options import BuildOptions, build_limits, check_options
from relaxpack.compile.progress import Progress, Silent, Stages
from relaxpack.compile.report import BuildReport, make_report
from relaxpack.compile.target_plan import Targets, plan_targets, target_specs
from relaxpack.compile.text_members import write_text_members
from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.writer import check_destination
from relaxpack.errors import EnvironmentProblem, UsageError
from relaxpack.relax_models.checkpoint import open_checkpoint

_DEFAULTS = BuildOptions()


def build_bundle(model: str | Path, output: str | Path, target: Targets = "cpu",
                 options: BuildOptions = _DEFAULTS, *, force: bool = False, dump: Path | None = None,
                 progress: Progress | None = None, databases: Sequence[str] = (), gpu: str | None = None) -> BuildReport:
    """Build a bundle of `model` (Hugging Face folder, .gguf file or a packaged name) at `output`, for one target or
    several. `databases`: tuning records to use, see `relaxpack.tuning.lookup`; nothing is searched for or timed here.
    `gpu`: whose records, where the GPU is not in this machine (`relaxpack.tuning.named_gpu`).

    Raises a RelaxpackError that says what is wrong; then nothing is left at `output`.
    """
    shown = progress or Silent()
    stage = Stages(shown)
    output = Path(output)
    check_options(options)
    check_destination(output, force)
    _prepare_dump(dump)
    _check_linker()
    specs = target_specs(target)
    machines = named_machines(gpu, specs, databases)
    with stage("checkpoint"):
        checkpoint = open_checkpoint(model, ignore_keys=options.ignore_config_keys, pretokenizer=options.pretokenizer)
        limits = build_limits(checkpoint, options)
        plans = plan_targets(specs, checkpoint, options.weights, options.activation_dtype, options.kv_dtype,
                             options.activations)
        for plan in plans:
            require_kernels(checkpoint.config, limits, plan)
    info = model_info(checkpoint, limits, plans[0])
    built: list[Built] = []
    with BundleWriter(output, force) as writer:     # before the long work: a place that cannot be written shows now
        writer.require_space(least_bytes(checkpoint, plans))
        for plan in plans:
            folder = dump / plan.spec.file_stem if dump is not None and len(plans) > 1 else dump
            with records_for(databases, plan.spec, machines.get(plan.spec.name)) as records:
                built.append(build_target(writer, checkpoint, plan, limits, options, folder, shown, stage, records))
        write_text_members(writer, checkpoint)
        recorded = record_canaries(writer, built, checkpoint, info, limits, (options.generates, options.embeds), stage)
        built = [dataclasses.replace(one, entry=entry) for one, entry in zip(built, recorded.entries, strict=True)]
        with stage("bundle"):
            manifest = writer.finish(make_manifest(checkpoint, info, built, options))
    return make_report(output, manifest, stage.seconds, built, checkpoint, recorded.missing,
                       options.enabled_passes)


def _prepare_dump(dump: Path | None) -> None:
    try:
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write the IR to {dump}: {error.strerror}; choose another --dump folder") from None


def _check_linker() -> None:
    import relaxpack.tvm_setup  # noqa: F401
    from tvm.support import cc

    found = cc.get_cc()     # $CXX, or one of those that are known
    if found is None or shutil.which(found) is None:
        raise EnvironmentProblem("building needs a C++ compiler to link the library, and there is no "
                                 f"{found or 'g++'}: apt-get install g++ (Debian, Ubuntu), or set CXX")
