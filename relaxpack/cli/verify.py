"""`relaxpack verify`: every digest, and the model's answers on this machine compared with those of the build."""

from __future__ import annotations

import click

from relaxpack.cli.options import bundle_argument, device_option, json_option
from relaxpack.cli.show import print_json
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.canary import CANARY, CanaryReport, CanarySet
from relaxpack.errors import BundleError, MissingMemberError


@click.command(short_help="Check a bundle's digests and the model's answers.")
@bundle_argument
@device_option
@json_option
@click.option("--no-run", is_flag=True, help="Check the digests only; the model is not run.")
def verify(bundle: str, device: str | None, as_json: bool, no_run: bool) -> int:
    """Check every digest of BUNDLE, load it, and compare the model's answers on this machine with those of the build.
    Exits with 5 where something differs."""
    with Bundle.open(bundle, verify="full") as opened:
        count = len(opened.manifest.members)
        if not as_json:
            click.echo(f"ok  digests of {count} members")
        reports = [] if no_run else _run(opened, device, as_json)
    failed = [report for report in reports if not report.ok]
    if as_json:
        print_json({"path": bundle, "ok": not failed, "members": count,
                    "canaries": [report.to_json() for report in reports]})
    return BundleError.exit_code if failed else 0


def _run(bundle: Bundle, device: str | None, quiet: bool) -> list[CanaryReport]:
    if CANARY not in bundle:
        raise MissingMemberError(f"{bundle.location} has no {CANARY}, so its answers cannot be checked; use --no-run "
                                 "for the digests alone, or build it again")
    canaries = CanarySet.from_bytes(bundle.read(CANARY))
    from relaxpack.runtime.canaries import check
    from relaxpack.runtime.load import load_runner

    reports = []
    for report in check(load_runner(bundle, kind=device), canaries):
        reports.append(report)
        if not quiet:
            click.echo(f"{'ok' if report.ok else 'BAD'}  {report.name}: {report.message}")
    return reports
