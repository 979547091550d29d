"""Is a record true here? Builds what it says, checks the numbers, and measures the time again beside the untuned kernel.

"failed": it does not build, crashes, or its numbers are wrong. "stale": it is not the faster one any more, or its time was
not reproduced. On a machine too busy to measure, or slower in the untuned kernel too, nothing is said about times.
"""

from __future__ import annotations

import atexit
import platform
import statistics
from datetime import UTC, datetime

from relaxpack import __version__
from relaxpack.errors import TuningError
from relaxpack.fingerprint import compiler_fingerprint, difference
from relaxpack.kernel_generations import for_workload
from relaxpack.schedules.tuning.noise import MIN_PAIRS, compare_rounds
from relaxpack.target import TargetSpec
from relaxpack.tuning.measure import LocalMeasurer, Measurer
from relaxpack.tuning.rounds import machine_conditions
from relaxpack.tuning.session import DUEL_ROUNDS, SEED
from relaxpack.tuning.worker import CandidateFailed
from relaxpack.tuning_record import Check, Origin, TuningRecord, Verdict

ROWS_OF_NONE = 1              # what a record without a bucket is checked with
SLOWER = 0.25                 # a time that is longer by more is not reproduced
SLOWED = 3.0                  # what other work or a lower clock may cost a machine; beyond, a record is not believed
SECONDS = 20.0
_measurers: dict[TargetSpec, LocalMeasurer] = {}


def verify(record: TuningRecord, retime: bool = True, measurer: Measurer | None = None) -> Verdict:
    """For a record of this machine's target. `measurer`: in place of one for this machine, which is kept for the next
    record."""
    measurer = measurer or _local(target_of(record))
    bucket = record.bucket or ROWS_OF_NONE
    libraries: list[str] = []
    try:
        try:
            libraries.append(measurer.build(record.workload, record.choice))
        except (CandidateFailed, TuningError) as error:
            state = "stale" if record.choice["kind"] == "trace" else "failed"
            return Verdict("stale" if state == "stale" else "failed", f"does not build: {error}")
        try:
            worst, where = measurer.check(libraries[0], record.workload, bucket, SEED)
        except CandidateFailed as error:
            return Verdict("failed", f"does not run: {error}")
        if not worst <= 1.0:
            return Verdict("failed", f"wrong numbers: {worst:.3g} times the allowed error ({where})")
        checked = Check(SEED, worst, 1.0)
        return _timed(record, measurer, libraries, bucket, checked) if retime else Verdict("good")
    finally:
        for library in libraries:
            measurer.discard(library)


def _timed(record: TuningRecord, measurer: Measurer, libraries: list[str], bucket: int, checked: Check) -> Verdict:
    try:
        libraries.append(measurer.build(record.workload, untuned(record)))
        rounds = measurer.time(libraries, record.workload, bucket, SEED, DUEL_ROUNDS, SECONDS)
    except CandidateFailed as error:
        return Verdict("failed", f"does not run: {error}")
    own, rule = (one.kept() or one.times_us for one in rounds)
    here = for_workload(compiler_fingerprint(str(record.target["kind"])), record.workload)
    moved = difference(here, record.compiler) != "" or record.origin.tool.startswith("import")
    if len(rounds[0].kept()) < MIN_PAIRS:
        return Verdict("good", "the machine is too busy to measure")
    now = statistics.median(own)
    if compare_rounds(rounds[1].times_us, rounds[1].clean, rounds[0].times_us, rounds[0].clean).wins:
        return Verdict("stale", f"{now:.4g} us here, slower than the untuned kernel's {statistics.median(rule):.4g} us")
    if not moved and now > record.median_us * (1 + max(SLOWER, 3 * record.spread)):
        slowed = statistics.median(rule) / record.baseline_us if record.baseline_us else 1.0
        if now / record.median_us <= min(SLOWED, slowed * (1 + SLOWER)):
            return Verdict("good", f"not measured: the untuned kernel takes {slowed:.3g} times as long as then, too")
        return Verdict("stale", f"time not reproduced: {record.median_us:.4g} us, then {now:.4g} us")
    if not moved:
        return Verdict("good")
    conditions = {"repeats": len(own), "rotated_bytes": rounds[0].rotated_bytes, **measurer.conditions(),
                  **machine_conditions()}
    origin = Origin(datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), platform.node(), f"relaxpack {__version__}", 0)
    return Verdict("good", renewed=record.remeasured(
        times_us=tuple(round(t, 4) for t in own), conditions=conditions, check=checked, origin=origin, compiler=here,
        baseline_us=round(statistics.median(rule), 4)))


def untuned(record: TuningRecord) -> dict[str, object]:
    """The choice of the rule for this work."""
    if record.workload.kind == "primfunc":
        return {"kind": "trace", "trace": [[], []]}     # see `candidates`
    return {"kind": "parameters", "parameters": {}}


def target_of(record: TuningRecord) -> TargetSpec:
    facts = record.target
    features = facts.get("features") or ()
    threads = facts.get("threads")
    assert isinstance(features, tuple), features
    return TargetSpec(str(facts["kind"]), str(facts["arch"]), tuple(map(str, features)),
                      **({"threads": threads} if isinstance(threads, int) else {}))


def _local(target: TargetSpec) -> LocalMeasurer:
    if target not in _measurers:
        _measurers[target] = LocalMeasurer(target)
        atexit.register(_measurers[target].close)
    return _measurers[target]
