"""What a build did: for its summary and for `--json`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relaxpack.compile.one_target import Built
from relaxpack.compile.text_members import chat_problem
from relaxpack.dist.manifest import Manifest
from relaxpack.passes.config import ON_REQUEST
from relaxpack.relax_models.checkpoint import Checkpoint


@dataclass(frozen=True)
class TargetReport:
    """What one target took: bytes of its library, of its parameters, and of those that no other target has."""

    name: str
    library_bytes: int
    params_bytes: int
    own_params_bytes: int
    kernels: dict[str, int]

    def kernel_text(self) -> str:
        return "kernels: " + ", ".join(f"{count} {source}" for source, count in self.kernels.items())


@dataclass
class BuildReport:
    """What a build did: for the summary and for `--json`. Seconds by stage, bytes by kind, both over all targets."""

    path: Path
    manifest: Manifest
    seconds: dict[str, float] = field(default_factory=dict)
    targets: list[TargetReport] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    can_chat: bool = True        # there is a chat template, and it renders a message

    @property
    def library_bytes(self) -> int:
        return sum(target.library_bytes for target in self.targets)

    @property
    def params_bytes(self) -> int:
        return sum(target.own_params_bytes for target in self.targets)

    def formats_text(self) -> str:
        return ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in self.manifest.weights.formats.items())

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "seconds": self.seconds, "library_bytes": self.library_bytes,
                "params_bytes": self.params_bytes, "formats": dict(self.manifest.weights.formats),
                "kernels": self.targets[0].kernels, "targets": [dataclasses.asdict(target) for target in self.targets],
                "phases": self.phases, "passes": self.passes, "warnings": self.warnings}


def make_report(path: Path, manifest: Manifest, seconds: dict[str, float], built: Sequence[Built], checkpoint: Checkpoint,
                no_canaries: str, enabled: Collection[str] = ()) -> BuildReport:
    """`enabled`: passes that were asked for by name. `no_canaries`: why there are none, empty where there are."""
    report = BuildReport(path, manifest, seconds, [_target_report(one, manifest) for one in built],
                         _of_all(built, "phases"), _of_all(built, "passes"), list(checkpoint.audit.warnings))
    if (problem := chat_problem(checkpoint)) is not None:
        report.can_chat = False
        if not any("no chat template" in warning for warning in report.warnings):
            report.warnings.append(problem)
    if no_canaries:
        report.warnings.append(f"the bundle has no canaries: {no_canaries}")
    report.warnings += [text for one in built if (text := _not_used(one))]
    report.warnings += [_idle(name, built) for name in sorted(enabled) if not _changed_something(name, built)]
    return report


def _changed_something(name: str, built: Sequence[Built]) -> bool:
    return any(record["name"] == name and record["ir"] for one in built for record in one.lowered.explanation["passes"])


def _idle(name: str, built: Sequence[Built]) -> str:
    targets = " and ".join(one.plan.spec.name for one in built)
    return f"the pass {name}, which was enabled, found nothing to change for {targets}: it needs {ON_REQUEST[name]}"


def _not_used(one: Built) -> str:
    """That the databases know nothing of this target's kernels, or other answers than those used; else ""."""
    tuning = one.lowered.explanation.get("tuning")
    if tuning is None:
        return ""
    rejected = tuning["rejected"]
    if not rejected:
        return "" if tuning["used"] else (
            f"no tuning record is of a kernel of {one.plan.spec.name}; `relaxpack db ls` lists the records, "
            "`relaxpack tune` makes some")
    (reason, _), *others = Counter(record["reason"] for record in rejected).most_common()
    return (f"{len(rejected)} tuning records of the kernels of {one.plan.spec.name} are not used: {reason}"
            + (" and other reasons" if others else "") + "; `relaxpack explain` lists them")


def _of_all(built: Sequence[Built], what: str) -> list[dict[str, Any]]:
    """Records of all targets; each names its target where there are several."""
    return [record if len(built) == 1 else {"target": one.plan.spec.name, **record}
            for one in built for record in one.lowered.explanation[what]]


def _target_report(one: Built, manifest: Manifest) -> TargetReport:
    return TargetReport(one.plan.spec.name, manifest.members[one.entry.library].bytes, one.lowered.parameter_bytes(),
                        sum(one.stored.values()), dict(one.entry.kernels))
