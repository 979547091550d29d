"""`DatabaseLookup`: tuning records for one build. Answers by the whole key, and keeps the books: which records were used,
and for kernels without one, which records of the same work there are and why none of them counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relaxpack.dist.tuning.layers import Layers, open_source
from relaxpack.dist.tuning.store import ANY, RecordSource
from relaxpack.fingerprint import compiler_fingerprint, difference, target_fingerprint
from relaxpack.target import TargetSpec
from relaxpack.tuning_record import Facts, TuningRecord, Workload, digest

SEED = Path(__file__).parents[1] / "schedules" / "tuning" / "seed"   # what `--db seed` means: a place of bundles


@dataclass(frozen=True)
class Rejected:
    """A record that says something about a kernel of this build and is not used."""

    kernel: str
    record: str
    bucket: int | None
    reason: str

    def to_json(self) -> dict[str, str | int | None]:
        return {"kernel": self.kernel, "record": self.record, "bucket": self.bucket, "reason": self.reason}


class DatabaseLookup:
    """`relaxpack.schedules.tuning.tuned.Records` over databases. Close it, or use it as a context manager."""

    def __init__(self, source: RecordSource, target: Facts, compiler: Facts) -> None:
        self.source, self.target, self.compiler = source, target, compiler
        self.used: dict[str, set[str]] = {}        # record id → kernels
        self.rejected: list[Rejected] = []
        self._told: set[tuple[str, str]] = set()

    @classmethod
    def open(cls, locations: Sequence[str], target: TargetSpec) -> DatabaseLookup:
        sources: list[RecordSource] = []
        try:
            sources += [open_source(SEED.as_posix() if location == "seed" else location) for location in locations]
            return cls(Layers(sources), target_fingerprint(target, must_be_here=False), compiler_fingerprint(target.kind))
        except BaseException:
            for source in sources:
                source.close()
            raise

    def __enter__(self) -> DatabaseLookup:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def find(self, workload: Workload, buckets: Sequence[int | None], kernel: str) -> TuningRecord | None:
        for bucket in buckets:
            record = self.source.lookup(workload.hash, bucket, digest(self.target), digest(self.compiler))
            if record is not None and record.workload.text == workload.text:
                return record
        self._explain(workload, buckets, kernel)
        return None

    def use(self, record: TuningRecord, kernel: str) -> None:
        self.used.setdefault(record.id, set()).add(kernel)

    def reject(self, record: TuningRecord, kernel: str, reason: str) -> None:
        if (record.id, kernel) not in self._told:
            self._told.add((record.id, kernel))
            self.rejected.append(Rejected(kernel, record.id, record.bucket, reason))

    def report(self) -> dict[str, object]:
        """For `explain.json`: plain values in a fixed order."""
        rejected = sorted(self.rejected, key=lambda r: (r.kernel, r.bucket or 0, r.record))
        return {"used": {record: sorted(kernels) for record, kernels in sorted(self.used.items())},
                "rejected": [one.to_json() for one in rejected]}

    def _explain(self, workload: Workload, buckets: Sequence[int | None], kernel: str) -> None:
        """Nothing fits: say of each record of this work what is wrong with it."""
        for record in self.source.all(ANY._replace(workload_hash=workload.hash)):
            if record.bucket in buckets:
                self.reject(record, kernel, self._why_not(record, workload))

    def _why_not(self, record: TuningRecord, workload: Workload) -> str:
        if different := difference(self.target, record.target):
            return f"another target: {different}"
        if different := difference(self.compiler, record.compiler):
            return f"another compiler: {different}"
        if record.status != "good":
            return f"marked {record.status}: {record.reason}"
        return "its workload has this hash but is another one"
