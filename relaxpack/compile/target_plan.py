"""What is decided for each target of a build before anything is compiled: dtypes and weight formats. Knows no kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from relaxpack.compile.weights import choose_formats
from relaxpack.errors import UsageError
from relaxpack.model_info import FP8, KV_DTYPES
from relaxpack.target import TargetSpec, parse_target
from relaxpack.weight_format import WeightFormat

if TYPE_CHECKING:
    from relaxpack.relax_models.checkpoint import Checkpoint

Targets = str | TargetSpec | Sequence[str | TargetSpec]

_ACTIVATIONS = {"cpu": ("float32",), "cuda": ("bfloat16", "float16")}     # the first one is the default
_COMPUTE = {"cpu": "CPU kernels compute in float32", "cuda": "GPU kernels compute in bfloat16 or float16"}
FP8_ARCH = "sm_90a"                          # whose kernels multiply fp8 with fp8
_CACHE = {"cpu": "the KV cache of a CPU is float16, float32 or fp8",
          "cuda": "the KV cache of a GPU has the activations' dtype or fp8"}


@dataclass(frozen=True)
class TargetPlan:
    spec: TargetSpec
    activation_dtype: str
    kv_dtype: str
    formats: Mapping[str, WeightFormat]     # of each matrix of the checkpoint
    activations: str = "float"              # "fp8": products of fp8 weights may round them to it


def target_specs(targets: Targets) -> tuple[TargetSpec, ...]:
    """Raises UsageError where one is unknown, where one stands twice and where there is none."""
    several = [targets] if isinstance(targets, str | TargetSpec) else list(targets)
    specs = tuple(parse_target(target) if isinstance(target, str) else target for target in several)
    if not specs:
        raise UsageError("no target: name at least one, like cpu or cuda:sm_90a")
    names = [spec.name for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"target {name} is given twice: a bundle holds each target once")
    return specs


def plan_targets(specs: Sequence[TargetSpec], checkpoint: Checkpoint, weights: str, activation_dtype: str | None,
                 kv_dtype: str | None, rounding: str = "as-is") -> list[TargetPlan]:
    """A dtype that is given holds for the targets that can have it and must be possible for one of them; the others
    have their default. `kv_dtype` is one of KV_DTYPES. `rounding`, one of ACTIVATIONS, holds likewise; "as-is" is what the
    checkpoint's scheme does."""
    kinds = list(dict.fromkeys(spec.kind for spec in specs))

    def refuse(what: str, why: dict[str, str]) -> NoReturn:
        raise UsageError(f"{what}: " + "; ".join(why[kind] for kind in kinds))

    activations = {kind: activation_dtype if activation_dtype in _ACTIVATIONS[kind] else _ACTIVATIONS[kind][0]
                   for kind in kinds}
    if activation_dtype is not None and activation_dtype not in activations.values():
        refuse(f"activation dtype {activation_dtype}", _COMPUTE)
    stored = KV_DTYPES.get(kv_dtype) if kv_dtype is not None else None
    caches = {kind: _kv_dtype(kind, str(activations[kind]), weights, stored) for kind in kinds}
    if kv_dtype is not None and stored not in caches.values():
        refuse(f"KV dtype {kv_dtype}", _CACHE)
    plans = [TargetPlan(spec, str(activations[spec.kind]), caches[spec.kind],
                        choose_formats(checkpoint, weights, str(activations[spec.kind]))) for spec in specs]
    return _rounded(plans, checkpoint.fp8_activations if rounding == "as-is" else rounding == "fp8", rounding == "fp8")


def _rounded(plans: list[TargetPlan], wanted: bool, asked: bool) -> list[TargetPlan]:
    """The plans with fp8 activations where they are `wanted` and possible. Raises UsageError where they were `asked` for
    and are possible nowhere."""
    able = [plan.spec.kind == "cuda" and plan.spec.arch == FP8_ARCH
            and any(fmt.name == "fp8" for fmt in plan.formats.values()) for plan in plans]
    if asked and not any(able):
        if all(plan.spec.arch != FP8_ARCH for plan in plans):
            raise UsageError(f"activations fp8: only cuda:{FP8_ARCH} has kernels that multiply fp8 with fp8, and the build "
                             f"is for {', '.join(plan.spec.name for plan in plans)}")
        found = sorted({fmt.name for plan in plans for fmt in plan.formats.values()})
        raise UsageError(f"activations fp8: no weight has the format fp8 (there are {', '.join(found)}): give an fp8 "
                         "checkpoint with a scale per channel or tensor, or --weights fp8")
    return [replace(plan, activations="fp8") if wanted and can else plan for plan, can in zip(plans, able, strict=True)]


def _kv_dtype(kind: str, activation_dtype: str, weights: str, wanted: str | None) -> str:
    if wanted == FP8:
        return FP8
    if kind == "cuda":
        return activation_dtype
    default = "float32" if weights == "f32" else "float16"
    return wanted if wanted in ("float16", "float32") else default
