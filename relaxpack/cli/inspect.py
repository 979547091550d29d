"""`relaxpack inspect`: what is in a bundle and whether it fits this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click
from rich.text import Text

from relaxpack.cli.options import bundle_argument, json_option
from relaxpack.cli.show import STYLES, console, print_json, table
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.describe import describe
from relaxpack.readable import human_bytes, printable


@click.command(short_help="Show what is in a bundle and whether it fits here.")
@bundle_argument
@json_option
@click.option("--members", is_flag=True, help="List every member with its size and digest.")
def inspect(bundle: str, as_json: bool, members: bool) -> None:
    """Show the model, targets, sizes, config audit and build options of BUNDLE, and which target would run here."""
    with Bundle.open(bundle) as opened:
        what = describe(opened)
    if as_json:
        return print_json(what)
    out = console()
    out.print(table(f"{what['path']} ({what['form']})", ("", ""), _overview(what)))
    out.print()
    columns = ("target", "fits here", "computes in, KV in", "library", "parameters", "arena", "kernels", "canaries")
    out.print(table("Targets", columns,
                    [_target_row(entry, what["chosen"]) for entry in what["targets"]]))
    out.print()
    if what["manifest"]["build_options"]:
        out.print(table("Build options", ("option", "value"), _rows(what["manifest"]["build_options"])))
        out.print()
    _print_audit(out, what["audit"])
    if members:
        out.print(table("Members", ("member", "size", "SHA-256"),
                        [(name, human_bytes(entry["bytes"]), entry["sha256"])
                         for name, entry in what["members"].items()]))


def _overview(what: dict[str, Any]) -> list[tuple[str, str]]:
    manifest, model = what["manifest"], what["manifest"]["model_info"]
    sizes = ", ".join(f"{kind} {human_bytes(count)}" for kind, count in what["sizes"].items())
    formats = ", ".join(f"{name} {human_bytes(count)}" for name, count in manifest["weights"]["formats"].items())
    versions = ", ".join(f"{name} {version}" for name, version in manifest["compiler"].items())
    return [
        ("model", f"{model['name']} ({model['architecture']}), {model['num_layers']} layers, "
                  f"hidden {model['hidden_size']}, {model['num_heads']} heads over "
                  f"{model['num_kv_heads']} KV heads of {model['head_dim']}, vocabulary {model['vocab_size']}"),
        ("context", f"{model['max_context']} tokens, pages of {model['page_size']}, "
                    f"{model['max_batch']} sequences a step, prefill by {model['prefill_chunk']}"),
        ("weights", formats),
        ("size", f"{human_bytes(what['bytes'])} ({sizes})"),
        ("source", _source(manifest["source"])),
        ("built by", f"relaxpack {manifest['relaxpack_version']}; {versions}"),
        ("key", manifest["key"]),
        ("runs here", what["chosen"] or "no: " + "; ".join(reason for entry in what["targets"]
                                                           for reason in entry["reasons"])),
    ]


def _source(source: Mapping[str, Any]) -> str:
    """The usual facts in words; a source of another kind as it is."""
    size, files = source.get("bytes"), source.get("files")
    if not {"name", "kind"} <= source.keys() or not isinstance(size, int) or not isinstance(files, list):
        return ", ".join(f"{name} {value}" for name, value in source.items())
    return (f"{source['name']} ({source['kind']}), {human_bytes(size)} in "
            + (f"{len(files)} files" if len(files) != 1 else "one file"))


def _target_row(entry: dict[str, Any], chosen: str | None) -> tuple[str | Text, ...]:
    fits = Text(printable("; ".join(entry["reasons"])) or ("yes, it would run" if entry["name"] == chosen else "yes"),
                STYLES["problem" if entry["reasons"] else "ok"])
    kernels = ", ".join(f"{count} {source}" for source, count in entry["kernels"].items() if count)
    arena = entry["memory_plan"].get("arena_bytes")
    shared = f", shared with {', '.join(entry['shared_with'])}" if entry["shared_with"] else ""
    rounded = "" if entry["activations"] == "float" else f" ({entry['activations']})"
    return (entry["name"], fits, f"{entry['activation_dtype']}{rounded}, {entry['kv_dtype']}",
            human_bytes(entry["library_bytes"]),
            f"{human_bytes(entry['params_bytes'])} in {entry['tensors']}{shared}",
            "" if arena is None else human_bytes(arena), kernels, _canary_text(entry))


def _canary_text(entry: dict[str, Any]) -> str:
    """Whose answers a target is held to."""
    by = entry["canary"].get("recorded_by")
    if by is None:
        return f"none: {entry['canary']['reason']}" if "reason" in entry["canary"] else ""
    return "its own" if by == entry["name"] else f"by {by}: it could not run where it was built"


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was given; None stands for what the model or the target decides."""
    return [(name, "default" if value is None else ", ".join(map(str, value)) or "none" if isinstance(value, list)
             else str(value)) for name, value in values.items()]


def _print_audit(out: Any, audit: dict[str, Any]) -> None:
    entries = audit.get("entries", [])
    if entries:
        used = [entry for entry in entries if entry["status"] == "used"]
        out.print(Text(f"Config audit: {len(used)} keys used, {len(entries) - len(used)} ignored (none unknown)", "bold"))
        for file in dict.fromkeys(entry["file"] for entry in entries):     # in the order of reading
            out.print(table("", (printable(file), "value", ""),
                            [(e["key"], e["value"], f"{e['status']}{f': {why}' if (why := e['why']) else ''}")
                             for e in entries if e["file"] == file]))
            out.print()
    for warning in audit.get("warnings", []):
        out.print(Text(printable(f"warning: {warning}"), STYLES["note"]))
