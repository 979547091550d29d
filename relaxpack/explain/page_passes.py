"""What each pass changed, as part of the report of `relaxpack explain --html`: sizes as a table, the IR as folded diffs."""

from __future__ import annotations

from typing import Any

from relaxpack.explain.digest import changes, step_functions
from relaxpack.explain.html_parts import Html, table, text
from relaxpack.explain.pass_notes import NOTES


def passes(what: dict[str, Any]) -> str:
    """The section."""
    kept, functions = changes(what["passes"]), step_functions(what)
    rows = []
    for before, after in zip([None, *kept], kept, strict=False):
        rows.append((after["phase"], after["name"], *(
            _change(before["bindings"].get(f) if before else None, after["bindings"].get(f)) for f in functions),
            _change(before["prim_funcs"] if before else None, after["prim_funcs"]),
            Html(f"<span class=why>{text(NOTES.get(after['name'], ''))}</span>")))
    out, more = ", ".join(what["disabled"]), ", ".join(what["enabled"])
    notes = "".join(f"<p>{text(note)}</p>" for note in what.get("notes", ()))
    diffs = "".join(_diffs(one) for one in what["passes"] if one.get("ir"))
    return ("<h2>What each pass changed</h2><p>Bindings of the step functions and PrimFuncs of the module, after "
            f"{len(what['passes'])} passes; those that changed nothing are not shown."
            + (f" Left out: {text(out)}." if out else "") + (f" On request: {text(more)}." if more else "") + f"</p>{notes}"
            + table(["phase", "pass", *functions, "PrimFuncs", "what it does"], rows, range(2, 3 + len(functions)))
            + (f"<h3 class=soft>The IR, pass by pass</h3><p>{text(HOW_TO_READ)}</p>{diffs}" if diffs else ""))


HOW_TO_READ = ("Renamed variables are no change. What repeats from layer to layer is there once, with its count. A GPU's "
               "buckets are shown by the smallest.")


def _change(before: int | None, after: int | None) -> Html:
    if after is None:
        return Html("")
    if before is None or before == after:
        return Html(str(after))
    mark = "down" if after < before else "up"
    return Html(f'{before} → {after} <span class={mark}>{after - before:+d}</span>')


def _diffs(one: dict[str, Any]) -> str:
    """One pass: a fold with the diff of each function."""
    counts = ", ".join(f"{name} −{change['removed']} +{change['added']}" for name, change in one["ir"].items())
    parts = "".join(f"<p class=soft>{text(name)}</p><div class=diff>{_lines(change)}</div>"
                    for name, change in one["ir"].items())
    return (f"<details class=pass><summary>{text(one['name'])} <span class=soft>in {text(one['phase'])}: "
            f"{text(counts)}</span></summary>{parts}</details>")


def _lines(change: dict[str, Any]) -> str:
    found = []
    for hunk in change["hunks"]:
        times = f"{hunk['count']} times like this" if hunk["count"] > 1 else "once"
        found.append(f"<code class=times>{times}</code>")
        for line in hunk["lines"]:
            kind = {"+": " class=add", "-": " class=del"}.get(line[:1], "")
            found.append(f"<code{kind}>{text(line)}</code>")
        if hunk["left_off"]:
            found.append(f"<code class=times>{hunk['left_off']} lines more of this change</code>")
    if change["left_off"]:
        found.append(f"<code class=times>{change['left_off']} other kinds of change</code>")
    return "".join(found)
