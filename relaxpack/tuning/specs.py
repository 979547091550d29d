"""Specs of kernels out of the text of a workload: the inverse of `Workload.kernel`."""

from __future__ import annotations

import json
from typing import Any

from relaxpack.errors import DamagedRecordError
from relaxpack.kernel_spec import AttentionSpec, FusedAttentionSpec, LinearSpec, NormSpec
from relaxpack.tuning_record import Workload
from relaxpack.weight_format import FORMATS

_SPECS: dict[str, type[Any]] = {"linear": LinearSpec, "norm": NormSpec, "attention": AttentionSpec, "append": AttentionSpec}


def family_and_spec(workload: Workload) -> tuple[str, Any]:
    """(family name, spec). Raises DamagedRecordError for a text that is none of ours."""
    try:
        data = json.loads(workload.text)
        family, fields = data["family"], dict(data["spec"])
        kind = next(spec for part, spec in _SPECS.items() if part in family.partition(".")[2])
        if kind is LinearSpec:
            weight = FORMATS[fields.pop("weight")["name"]]
            return family, LinearSpec.from_recorded({**fields, "weight": weight})
        if "attention" in fields:
            return family, FusedAttentionSpec(AttentionSpec(**fields["attention"]), fields["rows"])
        return family, kind(**fields)
    except (ValueError, KeyError, TypeError, StopIteration, AttributeError, RecursionError) as error:
        raise DamagedRecordError(f"workload {workload.name}: its text does not describe a kernel "
                                 f"({type(error).__name__}: {error})") from None


def as_asked(family: str, spec: Any) -> Workload | None:
    """The work of a matmul with a norm inside, which records leave out (`LinearSpec.recorded`): it is measured as a build
    has it. None for everything else."""
    if not isinstance(spec, LinearSpec) or (spec.norm_epsilon is None and not spec.prepares_norm):
        return None
    norm = {"norm_epsilon": spec.norm_epsilon, "prepares_norm": spec.prepares_norm, "residual": spec.residual,
            "phase": "decode"}
    return Workload.kernel(family, {**spec.recorded(), **norm})
