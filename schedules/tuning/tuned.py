"""`TunedKernels`: what a provider asks before it uses its rule. Puts the records of a kernel's parts together.

Which record counts for rows nobody tuned for is a rule: of the sizes that the build can have and the part covers, the
largest that has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from relaxpack.errors import CompileError, TuningError
from relaxpack.tuning_record import TuningRecord, Workload

from .family import KernelFamily


class Records(Protocol):
    """What a build knows (`relaxpack.tuning.lookup`)."""

    def find(self, workload: Workload, buckets: Sequence[int], kernel: str) -> TuningRecord | None:
        """The record of the first bucket that has one; says why there is none in its report."""

    def reject(self, record: TuningRecord, kernel: str, reason: str) -> None: ...

    def use(self, record: TuningRecord, kernel: str) -> None: ...


class TunedKernels:
    """`family_of(operation, spec)` may answer None. `limits`: most rows of a decode and of a prefill step."""

    def __init__(self, records: Records, family_of: Callable[[str, Any], KernelFamily | None],
                 limits: Mapping[str, int]) -> None:
        self._records, self._family_of, self._limits = records, family_of, limits

    def kernel(self, operation: str, spec: Any, name: str) -> tuple[Any, str] | None:
        """(what the family makes, source) of a kernel with records, or None. `name` is for the report."""
        family = self._family_of(operation, spec)
        if family is None:
            return None
        workload = family.workload(spec)
        given: dict[str, Any] = {}
        used: list[TuningRecord] = []
        phase = "prefill" if getattr(spec, "phase", operation).startswith("prefill") else "decode"
        for part in family.parts(spec):
            sizes = ([part.low] if part.low == part.high          # a function of exactly so many rows
                     else [size for size in bucket_sizes(self._limits[phase]) if part.covers(size)])
            record = self._records.find(workload, sizes, name)
            if record is None:
                continue
            parameters = as_parameters(record.choice)
            strange = sorted(set(parameters or {}) - part.space.names)
            if parameters is None or strange:
                what = f"parameters {', '.join(strange)}" if strange else "a trace"
                self._records.reject(record, name, f"{what} does not belong to {family.name} at {record.bucket} rows")
                continue
            given |= parameters
            used.append(record)
        if not used:
            return None
        try:
            func = family.make(spec, given)
        except (TuningError, CompileError, ArithmeticError, AssertionError, ValueError, TypeError, RuntimeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            for record in used:
                self._records.reject(record, name, reason)
            return None
        for record in used:
            self._records.use(record, name)
        return func, "tuned:" + "+".join(record.id[:16] for record in used)


def as_parameters(choice: Mapping[str, Any]) -> dict[str, Any] | None:
    """A library is a choice like any other, under the name "library"; a trace is none of a kernel."""
    if choice["kind"] == "library":
        return {**choice["parameters"], "library": choice["library"]}
    return dict(choice["parameters"]) if choice["kind"] == "parameters" else None


def as_choice(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: what a space proposes, as a record says it."""
    given = dict(parameters)
    library = given.pop("library", None)
    if library is not None:
        return {"kind": "library", "library": library, "parameters": given}
    return {"kind": "parameters", "parameters": given}


def bucket_sizes(limit: int) -> list[int]:
    """Sizes that are tuned for, large to small: the limit itself and the powers of two below it."""
    powers = [1 << i for i in range(limit.bit_length()) if 1 << i < limit]
    return [limit, *reversed(powers)]
