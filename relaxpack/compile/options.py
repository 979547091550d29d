"""What a build is asked for, what a model allows of it, and the switches of the pass pipeline that follow."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from relaxpack.errors import UsageError
from relaxpack.passes.config import HIGHEST_LEVEL, ON_REQUEST, OPTIONAL, PipelineConfig
from relaxpack.passes.specialize_buckets import decode_buckets, prefill_buckets, spread_buckets
from relaxpack.relax_models.checkpoint import Checkpoint
from relaxpack.relax_models.export import BuildLimits
from relaxpack.target import TargetSpec
from relaxpack.weight_format import ACTIVATIONS

EMBEDDINGS = ("none", "also", "only")
MAX_PAGE_SIZE = 65536
MAX_TOKENS = 2**31 - 1    # that a step may look at: kernels count in int32


@dataclass(frozen=True)
class BuildOptions:
    """`max_context` None: what the model supports. `activation_dtype` None: float32 on a CPU, bfloat16 on a GPU.
    `kv_dtype` None: on a CPU float32 for `f32` weights, else float16; on a GPU the activation dtype. A dtype that is
    given holds for the targets that can have it. `level` is what the command line calls -O: which optional passes run
    (`passes.config.OPTIONAL`), less the disabled ones and with those enabled that run on request alone (`ON_REQUEST`).
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

    @property
    def generates(self) -> bool:
        """Whether the bundle has functions that make text."""
        return self.embeddings != "only"

    @property
    def embeds(self) -> bool:
        """Whether the bundle has the function that embeddings need."""
        return self.embeddings != "none"

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "disabled_passes": sorted(self.disabled_passes),
                "enabled_passes": sorted(self.enabled_passes),
                "ignore_config_keys": list(self.ignore_config_keys)}


def check_options(options: BuildOptions) -> None:
    """Raises UsageError for values that no model can be built with."""
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
    for passes, known, other, can, cannot in (
            (options.disabled_passes, OPTIONAL, ON_REQUEST, "be disabled", "runs on request alone: leave out --enable"),
            (options.enabled_passes, ON_REQUEST, OPTIONAL, "be enabled", "runs unless it is disabled or -O is too low")):
        for name in sorted(passes - set(known)):
            near = difflib.get_close_matches(name, known, n=2)
            hint = cannot if name in other else f"did you mean {' or '.join(near)}?" if near else (
                f"these can {can}: {', '.join(known)}")
            raise UsageError(f"{name!r} is no pass that can {can}: {hint}")


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


def pipeline_config(target: TargetSpec, limits: BuildLimits, disabled: frozenset[str] = frozenset(),
                    generate: bool = True) -> PipelineConfig:
    """On a GPU every bucket of the batch gets a captured decode function; a CPU needs none, nor do embeddings."""
    if target.kind == "cpu" or not generate:
        return PipelineConfig(disabled)
    return PipelineConfig(disabled, decode_buckets(limits.max_batch), prefill_buckets(limits.prefill_chunk),
                          cuda_graph=True, spread_buckets=spread_buckets(limits.max_batch))
