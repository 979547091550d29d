"""`DatabaseLookup`: tuning records for one build. Answers by the whole key, and keeps the books: which records were used,
and for kernels without one, which records of the same work there are and why none of them counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from relaxpack.dist.tuning.layers import Layers, open_source
from relaxpack.dist.tuning.store import ANY, RecordSource
from relaxpack.fingerprint import compiler_fingerprint, described, difference, target_fingerprint
from relaxpack.kernel_generations import for_workload
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


@contextmanager
def open_sources(locations: Sequence[str]) -> Iterator[Layers]:
    """All of them as one, closed at the end. "seed" is the place of the records that come with relaxpack."""
    with ExitStack() as stack:
        sources: list[RecordSource] = []
        for location in locations:
            sources.append(open_source(SEED.as_posix() if location == "seed" else location))
            stack.callback(sources[-1].close)
        yield Layers(sources)


class DatabaseLookup:
    """`relaxpack.schedules.tuning.tuned.Records` over databases. Close it, or use it as a context manager."""

    def __init__(self, source: RecordSource, target: Facts, compiler: Facts) -> None:
        self.source, self.target, self.compiler = source, target, compiler
        self.used: dict[str, set[str]] = {}        # record id → kernels
        self.rejected: list[Rejected] = []
        self._told: set[tuple[str, str]] = set()

    @classmethod
    def open(cls, locations: Sequence[str], target: TargetSpec, facts: Facts | None = None) -> DatabaseLookup:
        """`facts`: of the machine the build is for, in place of those that are found here."""
        with ExitStack() as stack:
            source = stack.enter_context(open_sources(locations))
            found = cls(source, facts or target_fingerprint(target, must_be_here=False), compiler_fingerprint(target.kind))
            stack.pop_all()
        return found

    def __enter__(self) -> DatabaseLookup:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()

    def find(self, workload: Workload, buckets: Sequence[int | None], kernel: str) -> TuningRecord | None:
        compiler = digest(for_workload(self.compiler, workload))
        for bucket in buckets:
            record = self.source.lookup(workload.hash, bucket, digest(self.target), compiler)
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
        if self.target.get("kind") == record.target.get("kind") == "cuda" and self.target.get("name") is None:
            if self.target.get("arch") == record.target.get("arch"):
                return (f"of {described(record.target)}; no such GPU is here: "
                        f"--gpu \"{record.target.get('name')}\" says it is meant")
        if different := difference(self.target, record.target):
            return f"another target: {different}"
        if different := difference(for_workload(self.compiler, workload), record.compiler):
            return f"another compiler: {different}"
        if record.status != "good":
            return f"marked {record.status}: {record.reason}"
        return "its workload has this hash but is another one"
