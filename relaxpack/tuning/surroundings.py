"""What stands around a kernel while it is judged in a chain of layers: what a build with the records so far takes. So every
duel is about a layer as it would become, and the winners of a chain are judged together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relaxpack.schedules.tuning.family import KernelFamily
from relaxpack.schedules.tuning.tuned import as_parameters
from relaxpack.tuning.chain import Chain
from relaxpack.tuning.specs import family_and_spec
from relaxpack.tuning_record import TuningRecord, Workload


def choices_around(chain: Chain, judged: str, families: Mapping[str, KernelFamily],
                   find: Callable[[Workload, int], TuningRecord | None]) -> dict[str, dict[str, Any]]:
    """By the hash of their work the choices of kernels beside the `judged` one that are not the rule's. A record of another
    kernel than such work may have, one without the norm inside for example, is left out."""
    found = {}
    for key, work in chain.works().items():
        name, spec = family_and_spec(work)
        part = families[name].part(spec, chain.rows)
        if key == judged or part is None or (record := find(families[name].workload(spec), chain.rows)) is None:
            continue
        if (parameters := as_parameters(record.choice)) and any(one == parameters for one in part.space.all()):
            found[key] = dict(record.choice)
    return found
