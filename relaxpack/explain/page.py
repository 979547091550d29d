"""The report of `relaxpack explain --html`: one page without scripts, fonts or addresses from outside, for light and dark.

Takes the document of `relaxpack.explain`; every text from a bundle is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relaxpack.explain.digest import by_kernel, chain_text
from relaxpack.explain.html_parts import Html, table, text
from relaxpack.explain.page_passes import passes
from relaxpack.readable import human_bytes

_OPERATIONS = ("linear", "attention", "rope_append", "add_rms_norm", "rms_norm", "embedding", "sample", "other")
_STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1d1f23;--soft:#5d626b;--line:#e2e3e6;
--accent:#2f5fc4;--on:#fff;--add:#e3f4ea;--del:#fbe7e4;
--c0:#3b6fd4;--c1:#d9822b;--c2:#2f9e77;--c3:#9a5fc0;--c4:#c05f8d;--c5:#7f8c2f;--c6:#3a9bb5;--c7:#8a8f98}
@media(prefers-color-scheme:dark){:root{--bg:#15171b;--card:#1d2026;--ink:#e8e9ec;--soft:#9aa0aa;--line:#31353d;
--accent:#8db0ff;--on:#14161a;--add:#17352a;--del:#41231f;--c0:#6f9bf0;--c1:#e6a157;--c2:#58bd97;--c3:#bb8ddd;--c4:#dd8bb1;--c5:#a9b65c;--c6:#66bdd4;--c7:#8d939d}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}h1{font-size:24px;margin:0}h2{font-size:18px;margin:36px 0 8px}
p{margin:6px 0;max-width:110ch}.soft{color:var(--soft)}code{font:13px ui-monospace,monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:10px;margin:18px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:20px;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.scroll{overflow:auto;max-height:520px;border:1px solid var(--line);border-radius:8px;background:var(--card)}
table{border-collapse:collapse;width:100%;font-size:13.5px}th{position:sticky;top:0;background:var(--card);text-align:left;
color:var(--soft);font-weight:500;box-shadow:inset 0 -1px var(--line)}th,td{padding:5px 10px;white-space:nowrap}
td{border-top:1px solid var(--line)}tr:first-child td{border-top:0}.n{text-align:right;font-variant-numeric:tabular-nums}
.key{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.legend span{margin-right:16px;white-space:nowrap;font-size:13px;color:var(--soft)}
.wrap td{white-space:normal;overflow-wrap:anywhere}.wrap td:nth-child(4){white-space:nowrap}
svg{display:block;width:100%;background:var(--card);border:1px solid var(--line);border-radius:8px}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}details{margin:10px 0}summary{cursor:pointer;color:var(--accent)}
.down{color:var(--c2)}.up{color:var(--c1)}.why{white-space:normal;min-width:24em;color:var(--soft)}
.diff{margin:6px 0 14px;padding:8px 0;overflow-x:auto;max-height:560px;background:var(--card);border:1px solid var(--line);
border-radius:8px;font:12px/1.45 ui-monospace,monospace}.diff code{display:block;width:max-content;min-width:100%;
padding:0 12px;white-space:pre;font:inherit}.diff .add{background:var(--add)}.diff .del{background:var(--del)}
.diff .times{color:var(--soft);border-top:1px dashed var(--line);margin-top:6px;padding-top:4px}
.diff .times:first-child{border-top:0;margin-top:0;padding-top:0}
""" + "".join(f".c{i}{{background:var(--c{i});fill:var(--c{i})}}" for i in range(8))


def page(what: dict[str, Any]) -> str:
    """The whole document."""
    name = f"{what['model']['name']} for {what['target']}"
    body = [_head(what), _step(what), _prefill(what), passes(what), _memory(what), _functions(what), _schedules(what),
            _audit(what)]
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width,initial-scale=1"><title>{text(name)}: relaxpack explain</title>'
            f"<style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n")


def _color(operation: str) -> int:
    operation = {"rope_append_attention": "attention"}.get(operation, operation)
    return _OPERATIONS.index(operation) if operation in _OPERATIONS else len(_OPERATIONS) - 1


def _key(operation: str, label: str) -> Html:
    return Html(f'<i class="key c{_color(operation)}"></i>{text(label)}')


def _head(what: dict[str, Any]) -> str:
    model, step, memory, machine = what["model"], what["step"], what["memory"], what["machine"]
    tiles = [(step["launches"], f"kernels in a decode step, batch {what['rows']}"),
             (human_bytes(step["bytes"]), f"moved per step at context {what['context']}"),
             (f"{step['bytes_over_floor']:.3f}×" if step["bytes_over_floor"] else "–", "of weights + KV + logits"),
             (f"{step['seconds'] * 1e3:.2f} ms", f"at least, on {machine['name']}")]
    if not step["kernels"]:                  # a bundle that only embeds
        step = what["prefill"]
        tiles = [(step["launches"], f"kernels to embed {step['rows']} tokens"),
                 (human_bytes(step["bytes"]), "moved for them"),
                 (f"{step['seconds'] * 1e3:.2f} ms", f"at least, on {machine['name']}")]
    if "measured_seconds" in step:
        tiles.append((f"{step['measured_seconds'] * 1e3:.2f} ms",
                      f"measured here, {100 * step['seconds'] / step['measured_seconds']:.0f} % of the roofline"))
    if memory["live_bytes"]:
        tiles.append((human_bytes(memory["arena_bytes"]),
                      f"for intermediates, {memory['arena_bytes'] / memory['live_bytes']:.3f}× the lower bound"))
    tiles.append((f"{sum(what['weights'].values()) / 1e6:.1f} MB", "weights: " + ", ".join(what["weights"])))
    shown = "".join(f"<div class=tile><b>{text(value)}</b><span>{text(label)}</span></div>" for value, label in tiles)
    return (f"<h1>{text(model['name'])}</h1><p class=soft>{text(what['target'])} · {text(model['architecture'])}, "
            f"{model['num_layers']} layers, hidden size {model['hidden_size']} · activations {model['activation_dtype']}"
            f"{'' if what['activations'] == 'float' else ', ' + what['activations'] + ' in matmuls of many rows'}, "
            f"KV cache {model['kv_dtype']} · " + text(", ".join(f"{k} {v}" for k, v in what["compiler"].items()))
            + f"</p><div class=tiles>{shown}</div>")


def _bar(kernels: Sequence[dict[str, Any]], field: str, label: str) -> str:
    """One stacked bar: share of the step by operation."""
    total = sum(k[field] for k in kernels) or 1.0
    sums = {op: sum(k[field] for k in kernels if _color(k["operation"]) == _color(op)) for op in _OPERATIONS}
    x, parts = 0.0, []
    for operation, amount in sums.items():
        width = 1000 * amount / total
        if width > 0.5:
            share = f"{operation} {100 * amount / total:.1f} %"
            inside = f'<text x="{x + 6:.1f}" y="41" style="fill:var(--on)">{text(share)}</text>' if width > 110 else ""
            parts.append(f'<g><title>{text(share)}</title><rect class="c{_color(operation)}" x="{x:.1f}" y="24" '
                         f'width="{max(width - 1.5, 1):.1f}" height="26"/>{inside}</g>')
        x += width
    return f'<svg viewBox="0 0 1000 58" role="img"><text x="2" y="16">{text(label)}</text>{"".join(parts)}</svg>'


def _legend(kernels: Sequence[dict[str, Any]]) -> str:
    used = [op for op in _OPERATIONS if any(_color(k["operation"]) == _color(op) for k in kernels)]
    return "<p class=legend>" + "".join(f"<span>{_key(op, op)}</span>" for op in used) + "</p>"


def _columns(timed: bool) -> list[str]:
    return ["bytes", "MFLOP", "at least, µs", *(["measured, µs", "of roofline"] if timed else [])]


def _numbers(k: dict[str, Any], timed: bool) -> list[str]:
    found = [human_bytes(k["bytes"]), f"{k['flops'] / 1e6:.2f}", f"{k['seconds'] * 1e6:.2f}"]
    if timed:
        seconds = k["measured_seconds"]
        found += [f"{seconds * 1e6:.1f}", f"{100 * k['seconds'] / seconds:.0f} %" if seconds else "–"]
    return found


def _kernel_tables(step: dict[str, Any], timed: bool) -> str:
    kernels = step["kernels"]
    sums = table(["kernel", "schedule", "calls", *_columns(timed)],
                  [(_key(k["operation"], k["kernel"]), k["source"], k["calls"], *_numbers(k, timed))
                   for k in by_kernel(kernels)], range(2, 8))
    order = table(["#", "kernel", "shape", "schedule", *_columns(timed)],
                   [(i, _key(k["operation"], k["kernel"]), k["shape"], k["source"], *_numbers(k, timed))
                    for i, k in enumerate(kernels)], [0, *range(4, 9)])
    return f"{sums}<details><summary>All {len(kernels)} launches in order</summary>{order}</details>"


def _step(what: dict[str, Any]) -> str:
    step, machine = what["step"], what["machine"]
    if not step["kernels"]:
        return ""
    timed = "measured_seconds" in step
    bars = _bar(step["kernels"], "seconds", "predicted time by operation")
    if timed:
        bars += "<br>" + _bar(step["kernels"], "measured_seconds", "measured time by operation")
    return (f"<h2>One decode step</h2><p>Function <code>{text(step['function'])}</code>, batch {what['rows']}, context "
            f"{what['context']}: {step['launches']} kernels, {human_bytes(step['bytes'])}, "
            f"{step['flops'] / 1e9:.2f} GFLOP. The prediction is the larger of bytes over "
            f"{machine['bandwidth'] / 1e9:.0f} GB/s and FLOPs over {machine['peak'] / 1e12:.2f} TFLOP/s "
            f"({text(machine['origin'])}), kernel by kernel, without launches. {chain_text(step)}</p>"
            f"{_legend(step['kernels'])}{bars}<br>{_kernel_tables(step, timed)}")


def _prefill(what: dict[str, Any]) -> str:
    step = what["prefill"]
    if not step["kernels"]:
        return ""
    name, logits = ("embed step", "") if step["function"] == "embed" else ("prefill", "; logits for one row")
    return (f"<h2>One {name} of {step['rows']} tokens</h2>"
            f"<p>{step['launches']} kernels, {human_bytes(step['bytes'])}, "
            f"{step['flops'] / 1e9:.1f} GFLOP, at least {step['seconds'] * 1e3:.2f} ms{logits}.</p>"
            f"{_bar(step['kernels'], 'seconds', 'predicted time by operation')}<br>{_kernel_tables(step, False)}")


def _memory(what: dict[str, Any]) -> str:
    plans = what["memory_plan"]
    shown = sorted(plans, key=lambda name: -plans[name].get("live_bytes", 0))[:2]
    shown += [name for name in (what["step"]["function"],) if name in plans and name not in shown]
    total = what["memory"]["arena_bytes"] or 0
    pictures = "".join(f"<h3 class=soft>{text(name)}</h3>{_picture(plans[name])}" for name in shown
                       if plans[name]["tensors"])
    return ("<h2>Memory plan</h2><p>Each box is a tensor: from its first to its last use along the step (left to right), "
            f"at its place in the arena (bottom to top). All functions share {human_bytes(total)}. The line marks the step "
            f"with the most bytes alive. A checker has proved that no two live tensors overlap.</p>{pictures}")


def _picture(plan: dict[str, Any]) -> str:
    width, height = 1000.0, 260.0
    last = max(t["last"] for t in plan["tensors"]) or 1
    # A storage is as high as what this function puts into it; another function may need more of it.
    used = [max((t["offset"] + t["size"] for t in plan["tensors"] if t["storage"] == i), default=0)
            for i in range(len(plan["storages"]))]
    bases = [sum(used[:i]) for i in range(len(used) + 1)]
    total = bases[-1] or 1
    changes_: dict[int, int] = {}
    boxes = []
    for t in plan["tensors"]:
        x, w = width * t["first"] / last, max(width * (t["last"] - t["first"]) / last, 1.5)
        h = height * t["size"] / total
        y = height - height * (bases[t["storage"]] + t["offset"]) / total - h
        changes_[t["first"]] = changes_.get(t["first"], 0) + t["size"]
        changes_[t["last"]] = changes_.get(t["last"], 0) - t["size"]
        title = f"{t['name']}: {human_bytes(t['size'])} in steps {t['first']} to {t['last']}, storage {t['storage']}"
        if t.get("overwrites"):
            title += f", over {t['overwrites']}"
        boxes.append(f'<rect class="c{t["storage"] % 8}" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" '
                     f'height="{max(h, 0.6):.1f}" opacity=".72" stroke="var(--card)" stroke-width=".6"><title>'
                     f"{text(title)}</title></rect>")
    live = most = peak = 0
    for step in sorted(changes_):
        live += changes_[step]
        if live > most:
            most, peak = live, step
    x = width * peak / last
    side = "end" if x > width / 2 else "start"
    return (f'<svg viewBox="0 -18 {width:.0f} {height + 36:.0f}" role="img">{"".join(boxes)}<line x1="{x:.1f}" x2="{x:.1f}" '
            f'y1="-4" y2="{height}" stroke="var(--ink)" stroke-dasharray="4 3"/><text x="{x:.1f}" y="-7" '
            f'text-anchor="{side}">most alive at once: {human_bytes(plan.get("live_bytes", most))}, step {peak}</text>'
            f'<text x="2" y="{height + 13}">{human_bytes(total)} used in {len(plan["storages"])} storages, '
            f"{len(plan['tensors'])} tensors</text></svg>")


def _functions(what: dict[str, Any]) -> str:
    rows = [(f["name"], "captured graph" if f["captured"] else "eager", f["launches"], len(f["storages"]),
             human_bytes(f["bytes"]), human_bytes(f["live_bytes"]), human_bytes(f["tensor_bytes"]),
             human_bytes(f["result_bytes"]) if f["result_bytes"] else "–") for f in what["functions"]]
    return ("<h2>Functions, graphs and buckets</h2>"
            + table(["function", "runs as", "kernels", "storages", "bytes", "alive at most", "without reuse", "results"],
                     rows, range(2, 8)))


def _schedules(what: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {source}" for source, count in what["schedules"].items())
    other = ", ".join(f"{k['name']} ({k['source']})" for k in what["not_ours"])
    records = what["tuning_records"]
    return (f"<h2>Schedules</h2><p>PrimFuncs by source: {text(counts)}."
            + (f" Not covered by a kernel of ours: {text(other)}." if other else "")
            + f" Tuning records used: {len(records)}.</p>"
            + (table(["record"], [(record,) for record in records]) if records else ""))


def _audit(what: dict[str, Any]) -> str:
    audit = what["audit"]
    entries = audit.get("entries", [])
    if not entries:
        return ""
    warnings = "".join(f"<p>{text(w)}</p>" for w in audit.get("warnings", []))
    return ("<h2>Config audit</h2><div class=wrap>" + warnings
            + table(["file", "key", "value", "status", "why"],
                     [[e.get(k, "") for k in ("file", "key", "value", "status", "why")] for e in entries]) + "</div>")
