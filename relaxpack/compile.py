"""`build_bundle`: the story from a checkpoint to a bundle, and the only place where the compile-side rooms meet.

    open checkpoint → choose weight formats → export, passes, code → pack weights → canaries → bundle
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import relaxpack
from relaxpack import tvm_setup
from relaxpack.dist.bundle import BundleWriter
from relaxpack.dist.canary import CANARY, CanarySet, tolerance
from relaxpack.dist.compat import reasons_against
from relaxpack.dist.host import detect_host
from relaxpack.dist.integrity import canonical_json, sha256_bytes
from relaxpack.dist.key import artifact_key
from relaxpack.dist.manifest import Manifest, TargetEntry, WeightsSummary
from relaxpack.dist.writer import check_destination
from relaxpack.errors import CompileError, EnvironmentProblem, RelaxpackError, UsageError
from relaxpack.kernel_spec import KernelProvider
from relaxpack.lowering import Lowered, lower_model
from relaxpack.model_info import ModelInfo
from relaxpack.passes.config import PipelineConfig
from relaxpack.passes.pipeline import HIGHEST_LEVEL, OPTIONAL, left_out
from relaxpack.passes.specialize_buckets import decode_buckets, prefill_buckets
from relaxpack.recipe import Pack
from relaxpack.relax_models.checkpoint import Checkpoint, open_checkpoint
from relaxpack.relax_models.export import BuildLimits
from relaxpack.schedules.cuda_compile import check_library
from relaxpack.target import TargetSpec, parse_target
from relaxpack.weight_format import WeightFormat
from relaxpack.weights import ParameterMaker, choose_formats

MAX_PAGE_SIZE = 65536
MAX_TOKENS = 2**31 - 1    # that a step may look at: kernels count in int32
_LIBRARY_BYTES = 32 << 20  # room for code and object files, whose sizes are known too late
CANARY_TEXTS = {"plain": "The capital of France is", "code": "def fibonacci(n):\n    ",
                "unicode": "今日は、世界。 Grüße 👋"}


@dataclass(frozen=True)
class BuildOptions:
    """`max_context` None: what the model supports. `activation_dtype` None: float32 on a CPU, bfloat16 on a GPU.
    `kv_dtype` None: on a CPU float32 for `f32` weights, else float16; on a GPU the activation dtype. `level` is what the
    command line calls -O: which optional passes run (`passes.pipeline.OPTIONAL`), less the disabled ones."""

    weights: str = "as-is"
    activation_dtype: str | None = None
    max_context: int | None = None
    max_batch: int = 8
    prefill_chunk: int = 512
    page_size: int = 16
    kv_dtype: str | None = None
    level: int = HIGHEST_LEVEL
    disabled_passes: frozenset[str] = frozenset()
    ignore_config_keys: tuple[str, ...] = ()
    pretokenizer: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "disabled_passes": sorted(self.disabled_passes),
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


@dataclass
class BuildReport:
    """What a build did: for the summary and for `--json`. Seconds by stage, bytes by kind."""

    path: Path
    manifest: Manifest
    seconds: dict[str, float] = field(default_factory=dict)
    library_bytes: int = 0
    params_bytes: int = 0
    phases: list[dict[str, Any]] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    can_chat: bool = True        # there is a chat template, and it renders a message

    def kernel_text(self) -> str:
        counts = self.manifest.targets[0].kernels
        return "kernels: " + ", ".join(f"{count} {source}" for source, count in counts.items())

    def formats_text(self) -> str:
        return ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in self.manifest.weights.formats.items())

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "seconds": self.seconds, "library_bytes": self.library_bytes,
                "params_bytes": self.params_bytes, "formats": dict(self.manifest.weights.formats),
                "kernels": dict(self.manifest.targets[0].kernels), "phases": self.phases, "passes": self.passes,
                "warnings": self.warnings}


def build_bundle(model: str | Path, output: str | Path, target: str | TargetSpec = "cpu",
                 options: BuildOptions = BuildOptions(), *, force: bool = False, dump: Path | None = None,
                 progress: Progress | None = None) -> BuildReport:
    """Build a bundle of `model` (Hugging Face folder, .gguf file or a packaged name) at `output`.

    Raises a RelaxpackError that says what is wrong; then nothing is left at `output`.
    """
    shown = progress or _Silent()
    output = Path(output)
    _check_options(options)
    check_destination(output, force)
    _prepare_dump(dump)
    _check_linker()
    spec = parse_target(target) if isinstance(target, str) else target
    seconds: dict[str, float] = {}

    @contextmanager
    def stage(name: str, total: int | None = None) -> Iterator[None]:
        shown.stage(name, total)
        start = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - start, 3)

    with stage("checkpoint"):
        checkpoint = open_checkpoint(model, ignore_keys=options.ignore_config_keys, pretokenizer=options.pretokenizer)
        limits = _limits(checkpoint, options)
        provider = kernel_provider(spec)
        activation_dtype, kv_dtype = _dtypes(spec, options)
        formats = choose_formats(checkpoint, options.weights, activation_dtype)
    info = _model_info(checkpoint, limits, activation_dtype, kv_dtype)
    with BundleWriter(output, force) as writer:     # before the long work: a place that cannot be written shows now
        writer.require_space(_weight_bytes(checkpoint, formats) + _LIBRARY_BYTES)
        with stage("compile", 6):
            pipeline = pipeline_config(spec, limits, left_out(options.level, options.disabled_passes))
            lowered = lower_model(checkpoint.config, limits, spec, provider, formats, activation_dtype, kv_dtype,
                                  pipeline, dump, shown.advance)
        library = writer.scratch / f"{spec.file_stem}.so"
        with stage("library"):
            writer.require_space(_parameter_bytes(lowered) + _LIBRARY_BYTES)
            _export(lowered, library)
            if spec.kind == "cuda":
                check_library(library)
            writer.add_file(f"lib/{library.name}", library)
        with stage("weights", len(lowered.parameters)):
            params_bytes = _write_parameters(writer, spec, lowered, ParameterMaker(checkpoint, provider), shown)
        _write_text_members(writer, checkpoint, lowered)
        canaries = None
        if not reasons_against(spec, detect_host()):
            with stage("canaries", len(CANARY_TEXTS)):
                canaries = _record_canaries(writer, _target_entry(spec, lowered), library, info, checkpoint, formats)
                writer.add_bytes(CANARY, canaries.to_bytes())
        with stage("bundle"):
            manifest = writer.finish(_manifest(checkpoint, info, spec, lowered, options))
    report = BuildReport(output, manifest, seconds, manifest.members[f"lib/{library.name}"].bytes, params_bytes,
                         lowered.explanation["phases"], lowered.explanation["passes"],
                         list(checkpoint.audit.warnings))
    if (problem := _chat_problem(checkpoint)) is not None:
        report.can_chat = False
        if not any("no chat template" in warning for warning in report.warnings):
            report.warnings.append(problem)
    if canaries is None:
        report.warnings.append(f"target {spec.name} cannot run here, so the bundle has no canaries")
    return report


def kernel_provider(target: TargetSpec) -> KernelProvider:
    """The kernels for a target."""
    if target.kind == "cpu":
        from relaxpack.schedules.kernels.cpu.provider import CpuKernels

        return CpuKernels(target)
    from relaxpack.schedules.kernels.cuda.provider import CudaKernels

    return CudaKernels(target)


def pipeline_config(target: TargetSpec, limits: BuildLimits, disabled: frozenset[str] = frozenset()) -> PipelineConfig:
    """On a GPU every bucket of the batch gets a captured decode function; a CPU needs none."""
    if target.kind == "cpu":
        return PipelineConfig(disabled)
    return PipelineConfig(disabled, decode_buckets(limits.max_batch), prefill_buckets(limits.prefill_chunk),
                          cuda_graph=True)


def _dtypes(target: TargetSpec, options: BuildOptions) -> tuple[str, str]:
    """(activation dtype, KV dtype)."""
    if target.kind == "cpu":
        if options.activation_dtype not in (None, "float32"):
            raise UsageError(f"activation dtype {options.activation_dtype}: CPU kernels compute in float32")
        if options.kv_dtype == "bfloat16":
            raise UsageError("KV dtype bfloat16: the KV cache of a CPU is float16 or float32")
        return "float32", options.kv_dtype or ("float32" if options.weights == "f32" else "float16")
    activation = options.activation_dtype or "bfloat16"
    if activation not in ("bfloat16", "float16"):
        raise UsageError(f"activation dtype {activation}: GPU kernels compute in bfloat16 or float16")
    return activation, options.kv_dtype or activation


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
    if not 0 <= options.level <= HIGHEST_LEVEL:
        raise UsageError(f"optimisation level {options.level}: must be 0 to {HIGHEST_LEVEL}")
    unknown = options.disabled_passes - set(OPTIONAL)
    if unknown:
        raise UsageError(f"unknown pass {sorted(unknown)[0]!r}: these can be disabled: {', '.join(OPTIONAL)}")


def _limits(checkpoint: Checkpoint, options: BuildOptions) -> BuildLimits:
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


def _model_info(checkpoint: Checkpoint, limits: BuildLimits, activation_dtype: str, kv_dtype: str) -> ModelInfo:
    c, assets = checkpoint.config, checkpoint.assets
    return ModelInfo(checkpoint.source.name, c.architecture, c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads,
                     c.head_dim, c.vocab_size, limits.max_context, limits.page_size, kv_dtype, activation_dtype,
                     limits.max_batch, limits.prefill_chunk, assets.bos_token_id, assets.end_token_ids, assets.add_bos)


def _write_parameters(writer: BundleWriter, spec: TargetSpec, lowered: Lowered, maker: ParameterMaker,
                      shown: Progress) -> int:
    with writer.params(spec.file_stem) as params:
        for p in lowered.parameters:
            array = maker.make(p.recipe, p.dtype)
            assert array.shape == p.shape, (p.name, array.shape, p.shape)
            params.add(p.name, {"": array})
            shown.advance(p.name)
    return _parameter_bytes(lowered)


def _weight_bytes(checkpoint: Checkpoint, formats: Mapping[str, WeightFormat]) -> int:
    """What the matrices will take, known before anything is compiled; packing may pad them a little."""
    return int(sum(np.prod(checkpoint.tensors[name].shape) * fmt.bytes_per_weight() for name, fmt in formats.items()))


def _parameter_bytes(lowered: Lowered) -> int:
    return sum(p.bytes for p in lowered.parameters)


def _export(lowered: Lowered, library: Path) -> None:
    """Link the library; what lies on the way to it stays in its folder."""
    try:
        lowered.executable.export_library(str(library), workspace_dir=str(library.parent))
    except (RuntimeError, ValueError, FileNotFoundError) as error:
        raise CompileError(f"linking {library.name} failed: "
                           f"{(str(error).strip().splitlines() or [type(error).__name__])[-1]}") from error


def _write_text_members(writer: BundleWriter, checkpoint: Checkpoint, lowered: Lowered) -> None:
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
    # Times differ from build to build and would make equal builds differ.
    explanation = {**lowered.explanation, **{
        kind: [{k: v for k, v in p.items() if k != "seconds"} for p in lowered.explanation[kind]]
        for kind in ("phases", "passes")}}
    writer.add_bytes("explain.json", canonical_json(explanation))


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


def _record_canaries(writer: BundleWriter, entry: TargetEntry, library: Path, info: ModelInfo,
                     checkpoint: Checkpoint, formats: dict[str, Any]) -> CanarySet:
    """Run the fresh library on the packed parameters and keep its answers."""
    import tokenizers

    from relaxpack.runtime.canaries import record
    from relaxpack.runtime.load import make_runner

    encode = tokenizers.Tokenizer.from_str(checkpoint.assets.files["tokenizer.json"].decode())
    prompts: dict[str, Sequence[int]] = {name: ids[:info.max_context // 2] for name, text in CANARY_TEXTS.items()
                                         if (ids := encode.encode(text, add_special_tokens=False).ids)}
    parameters = writer.open_params(entry.params)
    runner = make_runner(library, entry, info, (parameters[name] for name in entry.param_order))
    return record(runner, prompts, tolerance({f.name for f in formats.values()}, info.activation_dtype))


def _target_entry(spec: TargetSpec, lowered: Lowered) -> TargetEntry:
    return TargetEntry(
        spec, f"lib/{spec.file_stem}.so", spec.file_stem, tuple(p.name for p in lowered.parameters),
        lowered.functions, lowered.bounds, lowered.buckets,
        {"arena_bytes": lowered.arena_bytes()}, lowered.kernel_counts())


def _manifest(checkpoint: Checkpoint, info: ModelInfo, spec: TargetSpec, lowered: Lowered,
              options: BuildOptions) -> Manifest:
    stored: Counter[str] = Counter()
    for p in lowered.parameters:
        stored[p.recipe.format if isinstance(p.recipe, Pack) else "f32"] += p.bytes
    compiler = {"apache-tvm": tvm_setup.TVM_VERSION}
    source = checkpoint.source.to_json()
    digest = sha256_bytes(canonical_json({"source": source, "tensors": {
        name: [list(t.shape), t.format.name] for name, t in checkpoint.tensors.items()}}))
    key = artifact_key(source_digest=digest, relaxpack_version=relaxpack.__version__, compiler=compiler,
                       targets=[spec.to_json()], weights=options.weights, build_options=options.to_json())
    return Manifest(relaxpack.__version__, key, info, WeightsSummary(dict(sorted(stored.items()))),
                    (_target_entry(spec, lowered),), compiler,
                    source, options.to_json())
