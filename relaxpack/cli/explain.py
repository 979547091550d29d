"""`relaxpack explain`: what the compiler did, from the bundle's own record."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the record as JSON.")
def explain(bundle: Path, as_json: bool) -> None:
    """Print kernels, their schedules (tuned, rule, fallback) and the memory plan of BUNDLE."""
    from relaxpack.dist.bundle import Bundle

    with Bundle.open(bundle) as opened:
        record = opened.read_json("explain.json")
    if as_json:
        json.dump(record, sys.stdout)
        sys.stdout.write("\n")
        return
    _print(record)


def _print(record: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    phases = Table(title="Phases", title_justify="left")
    for column in ("phase", "bindings decode", "bindings prefill", "PrimFuncs"):
        phases.add_column(column, justify="left" if column == "phase" else "right")
    for phase in record["phases"]:
        bindings = phase.get("bindings", {})
        phases.add_row(phase["phase"], *(str(bindings.get(f, "")) for f in ("decode", "prefill")),
                       str(phase.get("prim_funcs", "")))
    console.print(phases)
    for function, calls in record["calls"].items():
        table = Table(title=f"Kernels of one {function} step", title_justify="left")
        table.add_column("kernel")
        table.add_column("schedule")
        table.add_column("calls", justify="right")
        for call in calls:
            table.add_row(call["kernel"], call["source"], str(call["calls"]))
        table.add_row("total", "", str(sum(call["calls"] for call in calls)), style="bold")
        console.print(table)
    others = [k for k in record["kernels"] if k["source"] in ("fallback", "dlight")]
    if others:
        console.print("Not covered by a kernel of ours: " + ", ".join(f"{k['name']} ({k['source']})" for k in others))
    for function, plan in record["memory_plan"].items():
        planned = sum(t["size"] for t in plan["tensors"])
        console.print(f"Memory plan of {function}: {plan['bytes'] / 1e6:.2f} MB in {len(plan['storages'])} storages "
                      f"for {len(plan['tensors'])} tensors ({planned / 1e6:.2f} MB without reuse); checked: no two live "
                      f"tensors overlap")
