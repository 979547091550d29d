"""`relaxpack explain`: what the compiler did, from the bundle's own record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from relaxpack.cli.options import json_option
from relaxpack.cli.show import console, print_json, table
from relaxpack.dist.bundle import Bundle
from relaxpack.errors import UsageError
from relaxpack.explain.digest import by_kernel, chain_text, changes, step_functions
from relaxpack.readable import human_bytes, printable


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--target", metavar="NAME", help="Of a bundle with several: cpu, cuda, or a whole name [default: the first].")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a report for a browser here.")
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1), help="Sequences of the step shown.")
@click.option("--context", type=click.IntRange(1), help="Tokens each of them has [default: 1024, or what the bundle takes].")
@click.option("--pass", "one_pass", metavar="PASS", help="Print what this pass changed in the IR, as a diff.")
@click.option("--measure", is_flag=True, help="Time each kernel of a decode step here (batch 1).")
@click.option("--bandwidth", type=float, metavar="GB/S", help="Memory bandwidth of the machine to predict for.")
@click.option("--peak", type=float, metavar="TFLOP/S", help="Its arithmetic throughput.")
@json_option
def explain(bundle: Path, target: str | None, html: Path | None, one_pass: str | None, batch: int, context: int | None,
            measure: bool, bandwidth: float | None, peak: float | None, as_json: bool) -> None:
    """Print the kernels of a step of BUNDLE with what they move and must cost, what each pass changed, and the memory
    plan.

    \b
    relaxpack explain smollm2.bundle
    relaxpack explain smollm2.bundle --html report.html --measure
    relaxpack explain smollm2.bundle --pass FuseAddNorm
    """
    from relaxpack.explain.document import explanation
    from relaxpack.step_costs import machine_for

    if measure and batch != 1:
        raise UsageError(f"--measure with --batch {batch}: kernels are timed for one sequence; leave --batch out")
    with Bundle.open(bundle) as opened:
        entry = opened.target(target) if target or not measure else opened.select_target()
        if batch > (most := opened.manifest.info_for(entry).max_batch):
            raise UsageError(f"--batch {batch}: {bundle} was built for at most {most} sequences; choose up to that, or "
                             f"build it with --max-batch {batch}")
        if one_pass is not None:
            _print_pass(opened.read_json(entry.explain).get("passes", []), one_pass, as_json)
            return
        context = _context(context, opened.manifest.info_for(entry).max_context, bundle)
        spec = entry.target
        machine = machine_for(spec.kind, spec.arch, spec.features, bandwidth and bandwidth * 1e9,
                              peak and peak * 1e12)
        measured: list[tuple[str, float]] = []
        if measure:
            if entry != (here := opened.select_target(kind=spec.kind)):
                raise UsageError(f"--measure runs {here.target.name} here, not {spec.name}: leave --target out")
            from relaxpack.runtime.kernel_times import decode_kernel_times

            kernels = opened.read_json(entry.explain)["kernels"]
            if "decode" not in entry.functions:
                raise UsageError(f"--measure times a decode step, and {bundle} computes embeddings only: leave it out")
            names = {k["name"] for k in kernels if k["source"] != "host"}
            measured = decode_kernel_times(bundle, names, context, kind=spec.kind)
        what = explanation(opened, batch, context, machine, measured, spec.name)
    if html is not None:
        from relaxpack.explain.page import page

        try:
            html.write_text(page(what), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {html}: {error.strerror}; choose another --html file") from None
        click.echo(f"{html}: {html.stat().st_size / 1e3:.0f} kB", err=True)
    if as_json:
        print_json(what)
    elif html is None:
        _print(what)


def _context(asked: int | None, limit: int, bundle: Path) -> int:
    """Tokens before the step. One more than the bundle takes is said and cut, for the step that is shown adds one."""
    most = limit - 1
    if asked is not None and asked > most:
        click.echo(f"note: --context {asked}: {bundle} takes {limit} tokens, so this is a step after {most}", err=True)
    return min(1024 if asked is None else asked, most)


def _print(what: dict[str, Any]) -> None:
    out, embeds_only = console(), not what["step"]["kernels"]
    step = what["prefill"] if embeds_only else what["step"]
    timed = "measured_seconds" in step
    columns = ("kernel", "schedule", "calls", "bytes", "FLOPs", "at least, µs", *(("measured, µs", "of roofline") if timed
                                                                              else ()))
    size = f"{step['rows']} tokens" if embeds_only else f"batch {what['rows']}, context {what['context']}"
    title = f"One {step['function']} step: {size}, predicted for {what['machine']['name']}"
    out.print(table(title, columns, [_kernel_row(k, timed) for k in by_kernel(step["kernels"])]))
    over = step.get("bytes_over_floor")
    over = f", {over:.3f} of weights + keys and values + logits" if over else ""
    out.print(f"{step['launches']} kernels, {human_bytes(step['bytes'])}{over}, {step['flops'] / 1e9:.2f} GFLOP, "
              f"at least {step['seconds'] * 1e3:.2f} ms"
              + (f", measured {step['measured_seconds'] * 1e3:.2f} ms" if timed else ""))
    if timed and step["measured_seconds"] < step["seconds"]:
        out.print("Faster than the roofline: the data came from caches, or the bandwidth of the prediction is too low "
                  "(measured on a busy machine?); --bandwidth gives another")
    out.print("" if embeds_only else chain_text(step) + "\n")
    for note in what["notes"]:
        out.print(note, markup=False)
    functions = step_functions(what)
    out.print(table("What each pass left", ("phase", "pass", *functions, "PrimFuncs"), [
        (p["phase"], p["name"], *(str(p["bindings"].get(f, "")) for f in functions), str(p["prim_funcs"]))
        for p in changes(what["passes"])]))
    if what["disabled"]:
        out.print("Left out: " + ", ".join(what["disabled"]))
    if what["enabled"]:
        out.print("On request: " + ", ".join(what["enabled"]))
    if any(p.get("ir") for p in what["passes"]):
        out.print("The IR: --pass NAME prints what one pass changed, --html FILE shows it for all.")
    out.print()
    out.print(table("Memory of intermediates", ("function", "graph", "kernels", "storages", "bytes", "alive at most"), [
        (f["name"], "yes" if f["captured"] else "no", str(f["launches"]), str(len(f["storages"])),
         human_bytes(f["bytes"]), human_bytes(f["live_bytes"])) for f in what["functions"]]))
    memory = what["memory"]
    if memory["live_bytes"]:
        out.print(f"All functions share {human_bytes(memory['arena_bytes'])}, "
                  f"{memory['arena_bytes'] / memory['live_bytes']:.3f} of the lower bound; checked: no two live tensors "
                  "overlap")
    _print_tuning(what["tuning"], out)
    if what["not_ours"]:
        out.print("Not covered by a kernel of ours: "
                  + ", ".join(f"{k['name']} ({k['source']})" for k in what["not_ours"]))


def _print_tuning(tuning: dict[str, Any], out: Any) -> None:
    """Records the build used, and why it did not use others of the same work."""
    if tuning.get("used"):
        out.print("Tuning records used: " + ", ".join(f"{record[:16]} ({', '.join(kernels)})"
                                                      for record, kernels in tuning["used"].items()))
    if tuning.get("rejected"):
        out.print(table("Tuning records not used", ("kernel", "rows", "record", "why"), [
            (r["kernel"], str(r["bucket"] or ""), r["record"][:16], r["reason"]) for r in tuning["rejected"]]))


def _print_pass(passes: list[dict[str, Any]], name: str, as_json: bool) -> None:
    from relaxpack.explain.pass_notes import NOTES

    chosen = [p for p in passes if p["name"] == name]
    if not chosen:
        known = ", ".join(dict.fromkeys(p["name"] for p in passes if p.get("ir")))
        raise UsageError(f"pass {name!r} did not run on this bundle; these changed the IR: {known or 'none is recorded'}")
    if as_json:
        print_json(chosen)
        return
    for one in chosen:
        click.secho(f"{name} in {one['phase']}" + (f": {NOTES[name]}" if name in NOTES else ""), bold=True)
        if not one.get("ir"):
            click.echo("changed nothing in the step functions")
        for function, change in one.get("ir", {}).items():
            click.secho(f"\n{printable(function)}: {change['removed']} lines less, {change['added']} more", bold=True)
            for hunk in change["hunks"]:
                click.secho(f"@@ {hunk['count']} times @@" if hunk["count"] > 1 else "@@", fg="cyan")
                for line in hunk["lines"]:
                    click.secho(printable(line), fg={"-": "red", "+": "green"}.get(line[:1]))
                if hunk["left_off"]:
                    click.secho(f"@@ {hunk['left_off']} lines more of this change @@", fg="cyan")
            if change["left_off"]:
                click.secho(f"@@ {change['left_off']} other kinds of change @@", fg="cyan")


def _kernel_row(kernel: dict[str, Any], timed: bool) -> tuple[str, ...]:
    row = (kernel["kernel"], kernel["source"], str(kernel["calls"]), human_bytes(kernel["bytes"]),
           f"{kernel['flops'] / 1e6:.1f} M", f"{kernel['seconds'] * 1e6:.1f}")
    if not timed:
        return row
    seconds = kernel["measured_seconds"]
    return (*row, f"{seconds * 1e6:.1f}", f"{100 * kernel['seconds'] / seconds:.0f} %" if seconds else "")
