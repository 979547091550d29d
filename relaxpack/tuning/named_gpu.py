"""`build --gpu NAME`: a build for a GPU that is not in this machine. What its driver would say of it, the records that were
measured on it say; so the name completes to the facts of the one set of records that has it, or there is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxpack.dist.tuning.layers import Layers
from relaxpack.dist.tuning.store import ANY
from relaxpack.errors import UsageError
from relaxpack.fingerprint import described
from relaxpack.target import TargetSpec
from relaxpack.tuning.lookup import open_sources
from relaxpack.tuning_record import Facts, digest


def facts_of_gpu(name: str, targets: Sequence[TargetSpec], locations: Sequence[str]) -> dict[str, Facts]:
    """The facts by the name of the target: those of the GPU for each target whose architecture it has. `name` is that of the
    driver ("NVIDIA H200") or a part that only one GPU has. Raises UsageError with what the databases know instead."""
    if not name.strip():
        raise UsageError('--gpu needs the name of a GPU or a part of it, for example --gpu H200')
    wanted = [target for target in targets if target.kind == "cuda"]
    if not wanted:
        raise UsageError(f"--gpu {name!r}: no GPU is among the targets; add --target cuda:sm_90a, for example")
    if not locations:
        raise UsageError(f"--gpu {name!r} says whose tuning records to use: name a database, for example --db seed")
    with open_sources(locations) as source:
        known = _known(source)
        where = source.location
    found = {}
    for target in wanted:
        own = [facts for facts in known if facts.get("arch") == target.arch]
        matching = _matching(name, own)
        if len(matching) > 1:
            raise UsageError(f"--gpu {name!r} may be any of {_listed(matching)}; name one, or a database that has only one")
        if matching:
            found[target.name] = matching[0]
    if not found:
        archs = " and ".join(target.arch for target in wanted)
        raise UsageError(f"--gpu {name!r}: no records of such a GPU for {archs} in {where}; "
                         + (f"it has {_listed(known)}" if known else "it has records of no GPU at all"))
    return found


def _known(source: Layers) -> list[Facts]:
    """All GPUs with good records, in a fixed order."""
    found = {digest(record.target): record.target for record in source.all(ANY._replace(status="good"))
             if record.target.get("kind") == "cuda" and record.target.get("name")}
    return sorted(found.values(), key=lambda facts: (_name(facts), str(sorted(facts.items()))))


def _matching(name: str, known: Sequence[Facts]) -> list[Facts]:
    """Those with this very name, else those with it as a part."""
    exact = [facts for facts in known if _name(facts) == name.casefold()]
    return exact or [facts for facts in known if name.casefold() in _name(facts)]


def _name(facts: Facts) -> str:
    return str(facts["name"]).casefold()


def _listed(known: Sequence[Facts]) -> str:
    return "; ".join(f"{described(facts)}, {facts.get('memory_gib')} GiB" for facts in known)
