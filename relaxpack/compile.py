"""`build_bundle`: the story from a checkpoint to a bundle, and the only place where the compile-side rooms meet.

    open checkpoint → choose weight formats → for each target: export, passes, code, pack weights → canaries → bundle
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

import relaxpack
from relaxpack import tvm_setup
from relaxpack.build_canaries import BuiltTarget, record_canaries
from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.integrity import canonical_json, sha256_bytes
from relaxpack.dist.key import artifact_key
from relaxpack.dist.manifest import Manifest, TargetEntry, WeightsSummary
from relaxpack.dist.writer import check_destination
from relaxpack.errors import CompileError, EnvironmentProblem, RelaxpackError, UsageError
from relaxpack.kernel_spec import KernelProvider
from relaxpack.lowering import Lowered, lower_model
from relaxpack.model_info import ModelInfo
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.pipeline import HIGHEST_LEVEL, ON_REQUEST, OPTIONAL, left_out
from relaxpack.passes.specialize_buckets import decode_buckets, prefill_buckets, spread_buckets
from relaxpack.recipe import Pack
from relaxpack.relax_models.checkpoint import Checkpoint, open_checkpoint
from relaxpack.relax_models.export import BuildLimits
from relaxpack.schedules.cuda_compile import check_library
from relaxpack.storage_summary import storage_summary
from relaxpack.target import TargetSpec
from relaxpack.target_plan import TargetPlan, Targets, plan_targets, target_specs
from relaxpack.weight_format import ACTIVATIONS, WeightFormat
from relaxpack.weights import ParameterMaker, fixed_weights

if TYPE_CHECKING:
    from relaxpack.schedules.tuning.tuned import Records, TunedKernels
    from relaxpack.tuning.lookup import DatabaseLookup
    from relaxpack.tuning_record import Facts

EMBEDDINGS = ("none", "also", "only")
MAX_PAGE_SIZE = 65536
MAX_TOKENS = 2**31 - 1    # that a step may look at: kernels count in int32
_LIBRARY_BYTES = 32 << 20  # room for code and object files, whose sizes are known too late


@dataclass(frozen=True)
class BuildOptions:
    """`max_context` None: what the model supports. `activation_dtype` None: float32 on a CPU, bfloat16 on a GPU.
    `kv_dtype` None: on a CPU float32 for `f32` weights, else float16; on a GPU the activation dtype. A dtype that is
    given holds for the targets that can have it. `level` is what the command line calls -O: which optional passes run
    (`passes.pipeline.OPTIONAL`), less the disabled ones and with those enabled that run on request alone (`ON_REQUEST`).
    `embeddings`: whether the bundle also computes them, or computes nothing else and has no head. `activations`: whether
    products of many rows round them to fp8 (`weight_format.ACTIVATIONS`)."""

    weights: str = "as-is"
    activation_dtype: str | None = None
    max_context: int | None = None
    max_batch: int = 8
    prefill_chunk: int = 512
    page_size: int = 16
    kv_dtype: str | None = None
    level: int = HIGHEST_LEVEL
    disabled_passes: frozenset[str] = frozenset()
    enabled_passes: frozenset[str] = frozenset()
    ignore_config_keys: tuple[str, ...] = ()
    embeddings: str = "none"
    pretokenizer: str | None = None
    activations: str = "as-is"

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "disabled_passes": sorted(self.disabled_passes),
                "enabled_passes": sorted(self.enabled_passes),
                "ignore_config_keys": list(self.ignore_config_keys)}


class Progress(Protocol):
    """What a front end may show. `total` counts steps of the stage, or is None where it is one step."""

    def stage(self, name: str, total: int | None = None) -> None: ...
    def advance(self, what: str = "") -> None: ...


class _Silent:
    def stage(self, name: str, total: int | None = None) -> None:
        return None

    def advance(self, what: str = "") -> None:
        return None


@dataclass(frozen=True)
class TargetReport:
    """What one target took: bytes of its library, of its parameters, and of those that no other target has."""

    name: str
    library_bytes: int
    params_bytes: int
    own_params_bytes: int
    kernels: dict[str, int]

    def kernel_text(self) -> str:
        return "kernels: " + ", ".join(f"{count} {source}" for source, count in self.kernels.items())


@dataclass
class BuildReport:
    """What a build did: for the summary and for `--json`. Seconds by stage, bytes by kind, both over all targets."""

    path: Path
    manifest: Manifest
    seconds: dict[str, float] = field(default_factory=dict)
    targets: list[TargetReport] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    can_chat: bool = True        # there is a chat template, and it renders a message

    @property
    def library_bytes(self) -> int:
        return sum(target.library_bytes for target in self.targets)

    @property
    def params_bytes(self) -> int:
        return sum(target.own_params_bytes for target in self.targets)

    def formats_text(self) -> str:
        return ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in self.manifest.weights.formats.items())

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "seconds": self.seconds, "library_bytes": self.library_bytes,
                "params_bytes": self.params_bytes, "formats": dict(self.manifest.weights.formats),
                "kernels": self.targets[0].kernels, "targets": [dataclasses.asdict(target) for target in self.targets],
                "phases": self.phases, "passes": self.passes, "warnings": self.warnings}


@dataclass(frozen=True)
class _Built:
    """A target whose library and parameters are in the bundle."""

    plan: TargetPlan
    lowered: Lowered
    library: Path
    entry: TargetEntry
    digests: dict[str, str]           # of its parameters
    stored: dict[str, int]            # bytes by weight format, without what another target stored


def build_bundle(model: str | Path, output: str | Path, target: Targets = "cpu",
                 options: BuildOptions = BuildOptions(), *, force: bool = False, dump: Path | None = None,
                 progress: Progress | None = None, databases: Sequence[str] = (), gpu: str | None = None) -> BuildReport:
    """Build a bundle of `model` (Hugging Face folder, .gguf file or a packaged name) at `output`, for one target or
    several. `databases`: tuning records to use, see `relaxpack.tuning.lookup`; nothing is searched for or timed here.
    `gpu`: whose records, where the GPU is not in this machine (`relaxpack.tuning.named_gpu`).

    Raises a RelaxpackError that says what is wrong; then nothing is left at `output`.
    """
    shown = progress or _Silent()
    output = Path(output)
    _check_options(options)
    check_destination(output, force)
    _prepare_dump(dump)
    _check_linker()
    specs = target_specs(target)
    machines = named_machines(gpu, specs, databases)
    seconds: dict[str, float] = {}

    @contextmanager
    def stage(name: str, total: int | None = None) -> Iterator[None]:
        shown.stage(name, total)
        start = time.perf_counter()
        yield
        seconds[name] = round(seconds.get(name, 0.0) + time.perf_counter() - start, 3)

    with stage("checkpoint"):
        checkpoint = open_checkpoint(model, ignore_keys=options.ignore_config_keys, pretokenizer=options.pretokenizer)
        limits = build_limits(checkpoint, options)
        plans = plan_targets(specs, checkpoint, options.weights, options.activation_dtype, options.kv_dtype,
                             options.activations)
    info = _model_info(checkpoint, limits, plans[0])
    built: list[_Built] = []
    with BundleWriter(output, force) as writer:     # before the long work: a place that cannot be written shows now
        writer.require_space(_least_bytes(checkpoint, plans))
        for plan in plans:
            folder = dump / plan.spec.file_stem if dump is not None and len(plans) > 1 else dump
            with records_for(databases, plan.spec, machines.get(plan.spec.name)) as records:
                built.append(_build_target(writer, checkpoint, plan, limits, options, folder, shown, stage, records))
        _write_text_members(writer, checkpoint)
        functions = options.embeddings != "only", options.embeddings != "none"
        recorded = record_canaries(writer, [BuiltTarget(one.plan, one.entry, one.library) for one in built], checkpoint,
                                   info, limits, functions, stage)
        built = [dataclasses.replace(one, entry=entry) for one, entry in zip(built, recorded.entries, strict=True)]
        with stage("bundle"):
            manifest = writer.finish(_manifest(checkpoint, info, built, options))
    report = BuildReport(output, manifest, seconds, [_target_report(one, manifest) for one in built],
                         _of_all(built, "phases"), _of_all(built, "passes"), list(checkpoint.audit.warnings))
    if (problem := _chat_problem(checkpoint)) is not None:
        report.can_chat = False
        if not any("no chat template" in warning for warning in report.warnings):
            report.warnings.append(problem)
    if recorded.missing:
        report.warnings.append(f"the bundle has no canaries: {recorded.missing}")
    report.warnings += [text for one in built if (text := _not_used(one))]
    return report


def _not_used(one: _Built) -> str:
    """That the databases know other answers for this target's kernels, or ""."""
    rejected = one.lowered.explanation.get("tuning", {}).get("rejected", [])
    if not rejected:
        return ""
    (reason, _), *others = Counter(record["reason"] for record in rejected).most_common()
    return (f"{len(rejected)} tuning records of the kernels of {one.plan.spec.name} are not used: {reason}"
            + (" and other reasons" if others else "") + "; `relaxpack explain` lists them")


Stage = Callable[[str, int | None], AbstractContextManager[None]]


def _build_target(writer: BundleWriter, checkpoint: Checkpoint, plan: TargetPlan, limits: BuildLimits, options: BuildOptions,
                  dump: Path | None, shown: Progress, stage: Stage, records: DatabaseLookup | None) -> _Built:
    """Library and parameters of one target, written."""
    provider = kernel_provider(plan.spec, records, limits, plan.activations)
    with stage("compile", 6):
        generate, embed = options.embeddings != "only", options.embeddings != "none"
        pipeline = pipeline_config(plan.spec, limits, left_out(options.level, options.disabled_passes), generate)
        pipeline = dataclasses.replace(pipeline, enabled=options.enabled_passes,
                                       fixed_weights=fixed_weights(checkpoint, plan.formats))
        lowered = lower_model(checkpoint.config, limits, plan.spec, provider, plan.formats, plan.activation_dtype,
                              plan.kv_dtype, pipeline, dump, shown.advance, generate, embed, records)
    library = writer.scratch / f"{plan.spec.file_stem}.so"
    with stage("library", None):
        # Parameters of a further target may be those of the first.
        writer.require_space(_LIBRARY_BYTES + (0 if writer.members else _parameter_bytes(lowered)))
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
    return _Built(plan, lowered, library, _target_entry(plan, lowered, stem, shared, explain), dict(params.digests),
                  dict(stored))


def _of_all(built: Sequence[_Built], what: str) -> list[dict[str, Any]]:
    """Records of all targets; each names its target where there are several."""
    return [record if len(built) == 1 else {"target": one.plan.spec.name, **record}
            for one in built for record in one.lowered.explanation[what]]


def _target_report(one: _Built, manifest: Manifest) -> TargetReport:
    return TargetReport(one.plan.spec.name, manifest.members[one.entry.library].bytes, _parameter_bytes(one.lowered),
                        sum(one.stored.values()), dict(one.entry.kernels))


def named_machines(gpu: str | None, specs: Sequence[TargetSpec], databases: Sequence[str]) -> Mapping[str, Facts]:
    if gpu is None:
        return {}
    from relaxpack.tuning.named_gpu import facts_of_gpu

    return facts_of_gpu(gpu, specs, databases)


def records_for(databases: Sequence[str], target: TargetSpec,
                machine: Facts | None = None) -> AbstractContextManager[DatabaseLookup | None]:
    """The records of all databases for one target, or None where there are no databases. `machine`: its facts, where they
    are not those of this machine."""
    if not databases:
        return nullcontext()
    from relaxpack.tuning.lookup import DatabaseLookup

    return DatabaseLookup.open(databases, target, machine)


def kernel_provider(target: TargetSpec, records: Records | None = None,
                    limits: BuildLimits | None = None, activations: str = "float") -> KernelProvider:
    """The kernels for a target: those of `records` (for a build with these limits), else those of the rules."""
    if target.kind == "cpu":
        from relaxpack.schedules.kernels.cpu.provider import CpuKernels

        return CpuKernels(target, tuned_kernels(records, target, limits) if records and limits else None)
    from relaxpack.schedules.kernels.cuda.provider import CudaKernels

    return CudaKernels(target, tuned=tuned_kernels(records, target, limits) if records and limits else None,
                       activations=activations)


def tuned_kernels(records: Records, target: TargetSpec, limits: BuildLimits) -> TunedKernels:
    from relaxpack.schedules.tuning.tuned import TunedKernels
    from relaxpack.tuning.candidates import families_for, family_for

    families = families_for(target)
    return TunedKernels(records, lambda operation, spec: family_for(families, operation, spec),
                        {"decode": limits.max_batch, "prefill": limits.prefill_chunk})


def pipeline_config(target: TargetSpec, limits: BuildLimits, disabled: frozenset[str] = frozenset(),
                    generate: bool = True) -> PipelineConfig:
    """On a GPU every bucket of the batch gets a captured decode function; a CPU needs none, nor do embeddings."""
    if target.kind == "cpu" or not generate:
        return PipelineConfig(disabled)
    return PipelineConfig(disabled, decode_buckets(limits.max_batch), prefill_buckets(limits.prefill_chunk),
                          cuda_graph=True, spread_buckets=spread_buckets(limits.max_batch))


def _prepare_dump(dump: Path | None) -> None:
    try:
        if dump is not None:
            dump.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write the IR to {dump}: {error.strerror}; choose another --dump folder") from None


def _check_linker() -> None:
    from tvm.support import cc

    found = cc.get_cc()     # $CXX, or one of those that are known
    if found is None or shutil.which(found) is None:
        raise EnvironmentProblem("building needs a C++ compiler to link the library, and there is no "
                                 f"{found or 'g++'}: apt-get install g++ (Debian, Ubuntu), or set CXX")


def _check_options(options: BuildOptions) -> None:
    for name in ("max_batch", "prefill_chunk", "page_size"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name.replace('_', ' ')} {getattr(options, name)}: must be at least 1")
    if options.page_size > MAX_PAGE_SIZE:
        raise UsageError(f"page size {options.page_size}: must be at most {MAX_PAGE_SIZE}; 16 is a good one")
    if options.activations not in ACTIVATIONS:
        raise UsageError(f"activations {options.activations!r}: must be one of {', '.join(ACTIVATIONS)}")
    if options.embeddings not in EMBEDDINGS:
        raise UsageError(f"embeddings {options.embeddings!r}: must be one of {', '.join(EMBEDDINGS)}")
    if not 0 <= options.level <= HIGHEST_LEVEL:
        raise UsageError(f"optimisation level {options.level}: must be 0 to {HIGHEST_LEVEL}")
    unknown = options.disabled_passes - set(OPTIONAL)
    if unknown:
        raise UsageError(f"unknown pass {sorted(unknown)[0]!r}: these can be disabled: {', '.join(OPTIONAL)}")
    if unknown := options.enabled_passes - set(ON_REQUEST):
        raise UsageError(f"pass {sorted(unknown)[0]!r} is none that runs on request: these can be enabled: "
                         + ", ".join(ON_REQUEST))


def build_limits(checkpoint: Checkpoint, options: BuildOptions) -> BuildLimits:
    """Raises UsageError for options that the model cannot have."""
    supported = checkpoint.config.max_position
    wanted = options.max_context or supported
    if wanted > supported and checkpoint.config.rope.kind != "dynamic":
        raise UsageError(f"max context {wanted}: {checkpoint.source.name} supports {supported} tokens")
    if wanted < 2:
        raise UsageError(f"max context {wanted}: a sequence needs at least 2 tokens, one of a prompt and one of an answer")
    if wanted * options.max_batch > MAX_TOKENS:
        raise UsageError(f"max batch {options.max_batch}: with a context of {wanted} tokens at most {MAX_TOKENS // wanted} "
                         "sequences can be addressed; give a smaller --max-batch or --max-context")
    return BuildLimits(wanted, options.max_batch, min(options.prefill_chunk, wanted), options.page_size)


def _model_info(checkpoint: Checkpoint, limits: BuildLimits, plan: TargetPlan) -> ModelInfo:
    c, assets = checkpoint.config, checkpoint.assets
    return ModelInfo(checkpoint.source.name, c.architecture, c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads,
                     c.head_dim, c.vocab_size, limits.max_context, limits.page_size, plan.kv_dtype, plan.activation_dtype,
                     limits.max_batch, limits.prefill_chunk, assets.bos_token_id, assets.end_token_ids, assets.add_bos)


def _weight_bytes(checkpoint: Checkpoint, formats: Mapping[str, WeightFormat]) -> int:
    """What the matrices will take, known before anything is compiled; packing may pad them a little."""
    return int(sum(np.prod(checkpoint.tensors[name].shape) * fmt.bytes_per_weight() for name, fmt in formats.items()))


def _least_bytes(checkpoint: Checkpoint, plans: Sequence[TargetPlan]) -> int:
    """What the bundle takes at least: targets of one kind with the same formats share their parameters."""
    different = {(plan.spec.kind, tuple(sorted((name, fmt.name) for name, fmt in plan.formats.items()))): plan
                 for plan in plans}
    return (sum(_weight_bytes(checkpoint, plan.formats) for plan in different.values()) + len(plans) * _LIBRARY_BYTES)


def _parameter_bytes(lowered: Lowered) -> int:
    return sum(p.bytes for p in lowered.parameters)


def _export(lowered: Lowered, library: Path) -> None:
    """Link the library; what lies on the way to it stays in its folder."""
    try:
        lowered.executable.export_library(str(library), workspace_dir=str(library.parent))
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise CompileError(f"linking {library.name} failed: "
                           f"{(str(error).strip().splitlines() or [type(error).__name__])[-1]}") from error


def _write_text_members(writer: BundleWriter, checkpoint: Checkpoint) -> None:
    assets = checkpoint.assets
    for name, data in assets.files.items():
        writer.add_bytes(f"tokenizer/{name}", data)
    generation = {k: v for k, v in dataclasses.asdict(checkpoint.generation).items() if v is not None}
    writer.add_bytes("tokenizer/text.json", canonical_json({
        "chat_template": assets.chat_template, "named_templates": assets.named_templates,
        "bos_token": assets.bos_token, "eos_token": assets.eos_token, "bos_token_id": assets.bos_token_id,
        "end_token_ids": list(assets.end_token_ids), "add_bos": assets.add_bos,
        "special_tokens": assets.special_tokens, "generation": generation}))
    writer.add_bytes("audit.json", canonical_json(checkpoint.audit.to_json()))


def _explanation(lowered: Lowered) -> dict[str, Any]:
    """Without times, which differ from build to build and would make equal builds differ."""
    return {**lowered.explanation, **{
        kind: [{k: v for k, v in p.items() if k != "seconds"} for p in lowered.explanation[kind]]
        for kind in ("phases", "passes")}}


def _chat_problem(checkpoint: Checkpoint) -> str | None:
    """Why nobody can chat with this model, if so: no template, or one that does not render the simplest chat."""
    from relaxpack.runtime.chat_template import ChatTemplate
    from relaxpack.runtime.tokenizer import TextInfo, Tokenizer

    assets = checkpoint.assets
    text = TextInfo(assets.chat_template, assets.named_templates, assets.bos_token, assets.eos_token,
                    special_tokens=assets.special_tokens)
    try:
        ChatTemplate(Tokenizer(assets.files["tokenizer.json"].decode(), text)).encode([{"role": "user", "content": "Hi"}])
    except RelaxpackError as error:
        return str(error)
    return None


def _target_entry(plan: TargetPlan, lowered: Lowered, stem: str, shared: dict[str, tuple[str, ...]],
                  explain: str) -> TargetEntry:
    return TargetEntry(
        plan.spec, f"lib/{plan.spec.file_stem}.so", stem, tuple(p.name for p in lowered.parameters),
        lowered.functions, lowered.bounds, lowered.buckets,
        {"arena_bytes": lowered.arena_bytes(), "weight_bytes": _parameter_bytes(lowered),
         **storage_summary(lowered.explanation["memory_plan"])},
        lowered.kernel_counts(),
        tuning_records=tuple(lowered.explanation.get("tuning", {}).get("used", ())),
        activation_dtype=plan.activation_dtype, kv_dtype=plan.kv_dtype, shared_params=shared, explain=explain,
        libraries=_libraries(lowered), activations=plan.activations if plan.activations != "float" else None,
        spread={str(rows): asdict(costs) for rows, costs in lowered.spread.items()})


def _libraries(lowered: Lowered) -> dict[str, Any]:
    """Libraries that kernels call, with the number of these kernels."""
    sources = [kernel["source"] for kernel in lowered.explanation["kernels"]]
    names = Counter(source.partition(":")[2] for source in sources if source.startswith("library:"))
    return {name: {"kernels": count} for name, count in sorted(names.items())}


def _manifest(checkpoint: Checkpoint, info: ModelInfo, built: Sequence[_Built], options: BuildOptions) -> Manifest:
    stored: Counter[str] = Counter()
    for one in built:
        stored.update(one.stored)
    compiler = {"apache-tvm": tvm_setup.TVM_VERSION}
    source = checkpoint.source.to_json()
    key = artifact_key(source_digest=_source_digest(checkpoint, built), relaxpack_version=relaxpack.__version__,
                       compiler=compiler, targets=[one.plan.spec.to_json() for one in built], weights=options.weights,
                       build_options=options.to_json(),
                       tuning_records=[record for one in built for record in one.entry.tuning_records])
    return Manifest(relaxpack.__version__, key, info, WeightsSummary(dict(sorted(stored.items()))),
                    tuple(one.entry for one in built), compiler, source, options.to_json())


def _source_digest(checkpoint: Checkpoint, built: Sequence[_Built]) -> str:
    """Names the checkpoint by its content: where it came from, its config, everything about text, and each number that
    went into a parameter (by the digest of the parameter, made while it was written)."""
    assets = dataclasses.asdict(checkpoint.assets)
    assets["files"] = {name: sha256_bytes(data) for name, data in checkpoint.assets.files.items()}
    return sha256_bytes(canonical_json({
        "source": checkpoint.source.to_json(), "config": checkpoint.config.to_json(), "assets": assets,
        "audit": checkpoint.audit.to_json(), "generation": dataclasses.asdict(checkpoint.generation),
        "parameters": {one.plan.spec.name: one.digests for one in built}}))
