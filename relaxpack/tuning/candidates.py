"""From a workload and a choice to the PrimFunc that is compiled: the one place where a record becomes code, for the tuner,
for a build, and for a verification.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from typing import Any

from relaxpack.errors import TuningError
from relaxpack.schedules.tuning.family import KernelFamily
from relaxpack.schedules.tuning.tuned import as_parameters
from relaxpack.target import TargetSpec
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import Workload


@cache
def families_for(target: TargetSpec) -> dict[str, KernelFamily]:
    if target.kind == "cpu":
        from relaxpack.schedules.kernels.cpu.isa import Isa
        from relaxpack.schedules.tuning.cpu_spaces import families

        return families(Isa.of(target))
    from relaxpack.schedules.tuning.cuda_spaces import families as cuda_families

    return cuda_families(target)


def family_for(families: Mapping[str, KernelFamily], operation: str, spec: Any) -> KernelFamily | None:
    """The family that answers a provider's question, or None where nothing may vary."""
    if operation == "linear" and "cpu.linear_float" in families:
        if spec.weight.e4m3:
            return None
        return families["cpu.linear_quantized" if spec.weight.quantized else "cpu.linear_float"]
    return next((family for name, family in families.items() if name.partition(".")[2] == operation), None)


def prim_func(workload: Workload, choice: Mapping[str, Any], target: TargetSpec) -> Any:
    """The scheduled function. Raises TuningError (or what TVM raises for a trace) where the choice does not fit."""
    if workload.kind == "primfunc":
        return _scheduled(workload, choice, target)
    name, spec = family_and_spec(workload)
    if (family := families_for(target).get(name)) is None:
        raise TuningError(f"workload {workload.name}: there is no kernel {name} for {target.name}")
    parameters = as_parameters(choice)
    if parameters is None:
        raise TuningError(f"workload {workload.name}: a {choice['kind']} does not fit the kernel {name}")
    return family.make(spec, parameters)


def _scheduled(workload: Workload, choice: Mapping[str, Any], target: TargetSpec) -> Any:
    """Of a PrimFunc without a kernel: by a trace; an empty trace is what a build does without a record; "module" is a
    candidate of MetaSchedule's as base64 of TVM's JSON."""
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    from relaxpack.schedules.rest import rest_rule
    from relaxpack.tvm_records import apply_trace, workload_module

    if choice["kind"] == "module":
        return tvm.ir.load_json(base64.b64decode(choice["module"]).decode())["main"].with_attr("tirx.is_scheduled", True)
    if choice["kind"] != "trace":
        raise TuningError(f"workload {workload.name}: a {choice['kind']} does not fit a function of TVM's")
    if not choice["trace"][0]:
        func = workload_module(workload)["main"]
        return rest_rule(target)(func) or func
    return apply_trace(workload, choice["trace"]).mod["main"].with_attr("tirx.is_scheduled", True)
