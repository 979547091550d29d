"""`relaxpack verify`: every digest, and the model's answers on this machine compared with those of the build."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import click

from relaxpack.cli.options import bundle_argument, device_option, json_option
from relaxpack.cli.show import print_json
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.canary import CANARY, CanaryOrigin, CanaryReport, CanarySet
from relaxpack.errors import BundleError, MissingMemberError, TargetMismatchError


@click.command(short_help="Check a bundle's digests and the model's answers.")
@bundle_argument
@device_option
@json_option
@click.option("--no-run", is_flag=True, help="Check the digests only; the model is not run.")
def verify(bundle: str, device: str | None, as_json: bool, no_run: bool) -> int:
    """Check every digest of BUNDLE, load it, and compare the model's answers on this machine with those of the build.
    Exits with 5 where something differs.

    A GPU's code that was built where there was no GPU runs here for the first time; its answers are compared with those
    that a CPU gave at the build:

    \b
    relaxpack verify llama.bundle --device cuda
    """
    with Bundle.open(bundle, verify="full") as opened:
        count = len(opened.manifest.members)
        if not as_json:
            click.echo(f"ok  digests of {count} members")
        found = _Checked() if no_run else _run(opened, device, as_json)
    failed = [report for report in found.reports if not report.ok]
    if as_json:
        ran = {} if found.target is None else {"target": found.target, "recorded_by": found.recorded_by}
        print_json({"path": bundle, "ok": not failed, "members": count, **ran,
                    "canaries": [report.to_json() for report in found.reports]})
    return BundleError.exit_code if failed else 0


@dataclass
class _Checked:
    """`target` ran here, `recorded_by` at the build (both None where nothing ran or nothing is said)."""

    target: str | None = None
    recorded_by: str | None = None
    reports: list[CanaryReport] = field(default_factory=list)


def _run(bundle: Bundle, device: str | None, quiet: bool) -> _Checked:
    try:
        entry = bundle.select_target(kind=device)
    except TargetMismatchError as error:
        raise TargetMismatchError(f"{error}. Its digests alone are checked with --no-run") from None
    origin = CanaryOrigin.from_json(entry.canary)
    if CANARY not in bundle:
        why = f": {origin.reason}" if origin is not None and origin.reason else ""
        raise MissingMemberError(f"{bundle.location} has no {CANARY}{why}, so its answers cannot be checked; use --no-run "
                                 "for the digests alone, or build it again")
    canaries = CanarySet.from_bytes(bundle.read(CANARY))
    if origin is not None and origin.recorded_by:
        canaries = replace(canaries, tolerance=origin.tolerance)
    from relaxpack.cli.progress import counting
    from relaxpack.runtime.canaries import check
    from relaxpack.runtime.load import load_runner

    found = _Checked(entry.target.name, origin.recorded_by if origin else None)
    if not quiet and found.recorded_by not in (None, found.target):
        click.echo(f"note  {found.target} could not run where it was built: its answers are held against those of "
                   f"{found.recorded_by}")
    with counting("weights to the GPU", quiet, transfer=True) as progress:
        runner = load_runner(bundle, kind=device, progress=progress)
    for report in check(runner, canaries):
        found.reports.append(report)
        if not quiet:
            click.echo(f"{'ok' if report.ok else 'BAD'}  {report.name}: {report.message}")
    return found
