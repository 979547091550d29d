"""`KernelFamily`: a parametrised kernel as a thing to tune. One record tunes the parameters of one `Part`: those that
matter for a range of rows. A build puts the parts together again, so tuning a batch of 8 never touches the code of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaxpack.errors import TuningError
from relaxpack.tuning_record import Workload

from .space import Space


@dataclass(frozen=True)
class Part:
    """Rows `low` to `high` (None: any number) of a step."""

    low: int
    high: int | None
    space: Space

    def covers(self, rows: int) -> bool:
        return self.low <= rows and (self.high is None or rows <= self.high)


@dataclass(frozen=True)
class KernelFamily:
    """`canonical` leaves out of a spec what changes neither the code that matters nor its speed, so that a record serves
    all models and builds it fits. `make(spec, parameters)` is the PrimFunc (for a GPU: the Kernel); parameters that are
    not given are the rule's.
    """

    name: str
    canonical: Callable[[Any], Any]
    parts: Callable[[Any], Sequence[Part]]
    make: Callable[[Any, Mapping[str, Any]], Any]

    def workload(self, spec: Any, label: str | None = None) -> Workload:
        return Workload.kernel(self.name, self.canonical(spec), label)

    def part(self, spec: Any, rows: int) -> Part | None:
        """The part that a record of this many rows tunes, or None where nothing may vary there."""
        return next((part for part in self.parts(spec) if part.covers(rows)), None)


def known_parameters(given: Mapping[str, Any], default: Any) -> Any:
    """`default` (a frozen dataclass) with the given fields. Raises TuningError for one it does not have: a record of
    another generation of this kernel."""
    from dataclasses import fields, replace

    names = {field.name for field in fields(default)}
    if unknown := sorted(set(given) - names):
        raise TuningError(f"{type(default).__name__} has no parameter {', '.join(unknown)}; "
                          f"it has {', '.join(sorted(names))}")
    for name, value in given.items():
        wanted = getattr(default, name)
        if type(value) is not type(wanted) and not (isinstance(wanted, tuple) and isinstance(value, list)):
            raise TuningError(f"{type(default).__name__}.{name} is {value!r}, not a {type(wanted).__name__}")
    return replace(default, **{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
