"""Which kernels a target gets: the provider, with tuning records or without, and what attention it is asked for. Nothing is
searched for or timed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from relaxpack.compile.target_plan import TargetPlan
from relaxpack.errors import CompileError
from relaxpack.kernel_spec import AttentionSpec, KernelProvider
from relaxpack.relax_models.config import ModelConfig, expected_tensors
from relaxpack.relax_models.export import BuildLimits
from relaxpack.target import TargetSpec

if TYPE_CHECKING:
    from relaxpack.schedules.tuning.tuned import Records, TunedKernels
    from relaxpack.tuning.lookup import DatabaseLookup
    from relaxpack.tuning_record import Facts


def named_machines(gpu: str | None, specs: Sequence[TargetSpec], databases: Sequence[str]) -> Mapping[str, Facts]:
    """Target name → facts of the GPU that is named, from the records of it. Empty where none is named."""
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


def require_kernels(config: ModelConfig, limits: BuildLimits, plan: TargetPlan) -> None:
    """Raises CompileError, before anything is compiled, for sizes of a model that a target's kernels do not serve."""
    provider = kernel_provider(plan.spec, activations=plan.activations)
    try:
        provider.require_attention(attention_spec(config, limits, plan.activation_dtype, plan.kv_dtype))
    except CompileError as error:
        raise CompileError(f"{plan.spec.name}: {error}") from None
    for name, shape in expected_tensors(config).items():
        if name in plan.formats:
            rows, columns = shape
            try:
                provider.weight_layout(plan.formats[name], rows, columns, False)
            except CompileError as error:
                raise CompileError(f"{plan.spec.name}: {name} of {rows} x {columns}: {error}") from None


def tuned_kernels(records: Records, target: TargetSpec, limits: BuildLimits) -> TunedKernels:
    """What the records answer in the place of a rule, at the rows that a build with these limits has."""
    from relaxpack.schedules.tuning.tuned import TunedKernels
    from relaxpack.tuning.candidates import families_for, family_for

    families = families_for(target)
    return TunedKernels(records, lambda operation, spec: family_for(families, operation, spec),
                        {"decode": limits.max_batch, "prefill": limits.prefill_chunk})


def attention_spec(config: ModelConfig, limits: BuildLimits, activation_dtype: str, kv_dtype: str) -> AttentionSpec:
    """What the attention kernels of a model are asked for."""
    return AttentionSpec(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim,
                         config.rope.rotary_dim, limits.page_size, limits.max_pages, limits.max_context,
                         activation_dtype, kv_dtype, config.head_dim ** -0.5,
                         qk_norm_epsilon=config.norm_epsilon if config.qk_norm else None)
