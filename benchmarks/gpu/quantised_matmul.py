"""Checks and times the matmuls of quantised weights on one GPU, variants side by side, and cuBLAS in bf16 in the same run.

    python -m benchmarks.gpu.quantised_matmul build FOLDER [--set rules] [--only RE]  # anywhere with nvcc, no GPU needed
    python benchmarks/gpu/quantised_matmul.py run FOLDER --out DIR [--limit SECONDS]  # on the GPU: TVM runtime and torch

Numbers first: every kernel against float64 with poisoned outputs, `mixed` kernels with the weights that they make of codes.
Writes DIR/quantised-matmul.json after every variant and prints the fastest of each matmul, format and row count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.kernel_libraries import compile_parts, spilling
from benchmarks.gpu.matmul_bench import TOLERANCE, Bench, exact
from benchmarks.gpu.matmul_variants import LINEARS
from benchmarks.gpu.quantised_variants import FAMILIES, SETS, only

PER_MODULE = 16
CHAIN_PARTS = ("qkv", "o", "gate_up", "down")
CHAIN_LAYERS = 8


def scaled_weights(weight: Any, dtype: str) -> Any:
    """float32 `[N, K]`: what `gemm_mixed` makes of a quantised weight, step by step as codes_scaled.py does (its docstring
    says how far that is from the true weight). Every rounding here is of a sum that float64 holds exactly."""
    import ml_dtypes
    import numpy as np

    from relaxpack.weight_format import E4M3

    fmt, k = weight.format, weight.codes.shape[1]
    if fmt.name == "fp8":
        return weight.dequantize()                  # one scale a row: it is applied to the sums
    def rounded(value: Any) -> Any:
        return value.astype(np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16).astype(np.float64)

    def spread(groups: Any) -> Any:
        return np.repeat(groups.astype(np.float64), fmt.group_size, axis=1)[:, :k]

    codes = (E4M3[weight.codes] if fmt.e4m3 else weight.codes).astype(np.float64) - (8 if fmt.minimum == "-8*scale" else 0)
    if weight.zeros is not None:
        codes = codes - spread(weight.zeros)
    scale, least = spread(weight.scales), 0.0 if weight.minimums is None else spread(weight.minimums)
    if dtype == "float16" and fmt.scale_dtype == "float16":
        return rounded(codes * scale + least).astype(np.float32)
    if weight.minimums is not None:
        middle = 8 if fmt.bits == 4 else 16
        codes, least = codes - middle, rounded(least + middle * scale)
    upper = rounded(scale)
    return rounded(codes * upper + rounded(codes * rounded(scale - upper) + least)).astype(np.float32)


def make(v: dict[str, Any]) -> Any:
    from relaxpack.kernel_spec import NormSpec
    from relaxpack.schedules.kernels.cuda.dequantize import dequantize
    from relaxpack.schedules.kernels.cuda.gemm_few_bulk import gemm_few_bulk
    from relaxpack.schedules.kernels.cuda.gemm_group_columns import gemm_group_columns
    from relaxpack.schedules.kernels.cuda.gemm_mixed import gemm_mixed
    from relaxpack.schedules.kernels.cuda.gemm_rows_bulk import gemm_rows_bulk
    from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
    from relaxpack.schedules.kernels.cuda.norm import norm
    from relaxpack.weight_format import FORMATS

    n, k, name = v["n"], v["k"], v["name"]
    if v["family"] == "norm":
        return norm(NormSpec(k, 1e-5, v["dtype"], True), dependent_launch=True, name=name)
    if v["family"] == "dequantize":
        return dequantize(n, k, FORMATS[v["weight"]], v["dtype"], name=name)
    quantised = {"rows": gemm_rows_quant, "bulk": gemm_rows_bulk, "mixed": gemm_mixed, "fewbulk": gemm_few_bulk,
                 "groups": gemm_group_columns}
    return quantised[v["family"]](n, k, FORMATS[v["weight"]], v["dtype"], v["out_dtype"], name=name, **v["options"])


def build(folder: Path, variants: list[dict[str, Any]]) -> None:
    """What spills registers is left out of the index, unless a rule takes it or it is only compared."""
    made = compile_parts(folder, "quantised", {v["name"]: partial(make, v) for v in variants}, PER_MODULE)
    spills = set(spilling(made))
    for name in sorted(spills):
        print("stack frame:", name, made[name].get("stack"), made[name].get("local"))
    (folder / "index.json").write_text(json.dumps([
        {**v, **made[v["name"]]} for v in variants if v["name"] not in spills or v.get("rule") or v["check"]]))


# --- GPU machine ------------------------------------------------------------------------------------------------------

class QuantisedBench(Bench):
    """`Bench` whose references know what `mixed` kernels make of a weight."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.plain: dict[Any, Any] = {}         # the unpacked weight of what is measured, by matmul, format and dtype
        self.compared: list[dict[str, Any]] = []

    def rounds_weights(self, v: dict[str, Any]) -> bool:
        """Whether a kernel makes numbers of the activations' type of a weight before it multiplies them."""
        from relaxpack.weight_format import FORMATS, WHOLE_ROW

        scaled = v["family"] == "mixed" or bool(v["options"].get("scaled"))
        return scaled and FORMATS[v["weight"]].group_size != WHOLE_ROW

    def reference(self, v: dict[str, Any], canonical: Any, x: Any, bias: Any, residual: Any) -> Any:
        plain = scaled_weights(canonical, v["dtype"]) if self.rounds_weights(v) else canonical.dequantize()
        return exact(x, self.torch.from_numpy(plain).cuda(), bias, residual, bool(v["options"].get("glu")), in_order=False)

    def check(self, variant: dict[str, Any]) -> list[dict[str, Any]]:
        torch, options, found = self.torch, variant["options"], []
        fn = self.kernel(variant)
        (buffers,), canonical = self.packed({**variant, "options": {"swiglu": bool(options.get("glu"))}}, 1)
        width = variant["n"] // 2 if options.get("glu") else variant["n"]
        bias = self.random((variant["n"],), "float32") if options.get("bias") else None
        for t in variant["check"]:
            x = self.random((t, variant["k"]), variant["dtype"])
            residual = self.random((t, width), variant["dtype"]) if options.get("residual") else None
            results = []
            for _ in range(3):
                y = torch.full((t, width), float("nan"), device="cuda", dtype=getattr(torch, variant["out_dtype"]))
                fn(x, *[self.view(b) for b in buffers], *([] if bias is None else [bias]),
                   *([] if residual is None else [residual]), y)
                results.append(y)
            z = self.reference(variant, canonical, x, bias, residual)
            error = float((results[0].double() - z).norm() / z.norm())
            found.append({"name": variant["name"], "t": t, "error": error, "ok": error < TOLERANCE[variant["out_dtype"]],
                          "same_again": all(bool(torch.equal(results[0], y)) for y in results[1:])})
        return found

    def measure(self, variant: dict[str, Any]) -> list[dict[str, Any]]:
        """A kernel whose result is not what the unpacked weight gives is not timed. Unpacked to float16, eight times finer
        than bf16: where minimums give weights a mean, few rows of x can have sums so small that the rounding of the weight
        to bf16 makes 6e-3 of the result. To bf16 for kernels that round it so themselves."""
        gated = LINEARS[variant["linear"]][2]
        variant = {**variant, "options": {**variant["options"], "swiglu": gated}}
        key = (variant["linear"], variant["weight"])
        found: list[dict[str, Any]] = super().measure(variant | {"rows": variant["rows"] if variant["rows"] == [0] else []})
        if variant["rows"] == [0]:
            n, k, weight = variant["n"], variant["k"], self.weights[key][0]
            self.plain = {at: plain for at, plain in self.plain.items() if at[:2] == key}
            plain = self.plain[*key, variant["dtype"]] = self.torch.empty(
                (n, k), device="cuda", dtype=getattr(self.torch, variant["dtype"]))
            self.kernel(variant)(*[self.view(c) for c in weight], plain)
            return found
        plain = self.plain.get((*key, variant["dtype"] if self.rounds_weights(variant) else "float16"))
        for t in variant["rows"]:
            x = self.random((t, variant["k"]), variant["dtype"])
            y = self.torch.full((t, variant["n"] // 2 if gated else variant["n"]), float("nan"), device="cuda",
                                dtype=getattr(self.torch, variant["out_dtype"]))
            self.kernel(variant)(x, *[self.view(c) for c in self.weights[key][0]], y)
            if plain is not None:
                verdict = self.verdict(variant, t, y, exact(x, plain, None, None, gated, in_order=True))
                self.compared.append({**verdict, "same_again": True})
                if verdict["ok"]:
                    found += super().measure(variant | {"rows": [t]})
        return found

    def chains(self, index: list[dict[str, Any]], weight: str) -> list[dict[str, Any]]:
        """One 8B layer's norms and matmuls, dependent launch, each kernel reading what the one before wrote."""
        torch, found, h = self.torch, [], 4096
        by_name = {v["name"]: v for v in index}
        shapes = {part: LINEARS[f"8b.{part}"] for part in CHAIN_PARTS}
        layers = [{part: self.packed({"n": n, "k": k, "weight": weight, "dtype": "bfloat16", "options": {"swiglu": gated}},
                                     1)[0][0] for part, (n, k, gated) in shapes.items()} for _ in range(CHAIN_LAYERS)]
        norm, scale = self.kernel(by_name["norm4096"]), torch.ones(h, device="cuda")
        for rows, choices in chain_choices(index, weight):
            for label, names in choices.items():
                run = {part: self.kernel(by_name[name]) for part, name in names.items()}
                start = self.random((rows, h), "bfloat16")
                x, residual, calls = start, torch.zeros_like(start), []
                for layer in layers:
                    for first, second in (("qkv", "o"), ("gate_up", "down")):
                        total, y, out = (torch.empty_like(start) for _ in range(3))
                        calls.append(partial(norm, x, residual, scale, total, y))
                        n, _, gated = shapes[first]
                        middle = torch.empty((rows, n // 2 if gated else n), device="cuda", dtype=x.dtype)
                        calls.append(partial(run[first], y, *[self.view(b) for b in layer[first]], middle))
                        if first == "qkv":          # its first columns stand for attention's result
                            part = middle[:, :h] if rows == 1 else torch.empty_like(start)
                            if rows > 1:
                                calls.append(partial(part.copy_, middle[:, :h]))
                            middle = part
                        calls.append(partial(run[second], middle, *[self.view(b) for b in layer[second]], out))
                        x, residual = out, total
                us = self.time(calls) * len(calls) / CHAIN_LAYERS
                found.append({"chain": label, "weight": weight, "t": rows, "us": us, "kernels": names})
        return found


TIMES: dict[tuple[str, int], float] = {}          # variant name, rows → us


def chain_choices(index: list[dict[str, Any]], weight: str) -> list[tuple[int, dict[str, dict[str, str]]]]:
    """Row count → label → kernel by part: what the rules take and took before, and the best of each family and of all."""
    found = []
    for rows in (1, 16, 32, 64):
        choices: dict[str, dict[str, str]] = {}
        for part in CHAIN_PARTS:
            ours = [v for v in index if v["linear"] == f"8b.{part}" and v["weight"] == weight]
            marked = {mark: v["name"] for mark in ("rule", "before") for v in ours if rows in v.get(mark, ())}
            if "rule" in marked:
                choices.setdefault("rule", {})[part] = marked["rule"]
                choices.setdefault("before", {})[part] = marked.get("before", marked["rule"])
            for label, families in (("fewbulk", ("fewbulk",)), ("mixed", ("mixed",)), ("best", FAMILIES.values())):
                timed = [(TIMES[v["name"], rows], v["name"]) for v in ours
                         if v["family"] in families and (v["name"], rows) in TIMES]
                if timed:
                    choices.setdefault(label, {})[part] = min(timed)[1]
        whole = {label: names for label, names in choices.items() if len(names) == len(CHAIN_PARTS)}
        found.append((rows, {label: names for i, (label, names) in enumerate(whole.items())
                             if names not in list(whole.values())[:i]}))
    return found


def run(folder: Path, out: Path, limit: float) -> int:
    started = time.time()
    bench = QuantisedBench(folder)
    index = json.loads((folder / "index.json").read_text())
    result: dict[str, Any] = {"device": bench.torch.cuda.get_device_name(), "checks": [], "times": [], "chains": [],
                              "failures": [], "ceilings": bench.ceilings(),
                              "rules": [[v["name"], t] for v in index for t in v.get("rule", ())]}

    def save() -> None:
        result["seconds"] = time.time() - started
        (out / "quantised-matmul.json").write_text(json.dumps(result))

    def attempt(name: str, work: Any) -> None:
        try:
            work()
            bench.torch.cuda.synchronize()
        except Exception as error:   # one broken kernel must not hide the others; it is reported and fails the run
            result["failures"].append({"name": name, "error": f"{type(error).__name__}: {error}"[:500]})
            if "illegal" in str(error).lower() or "unspecified launch" in str(error):
                save()
                raise SystemExit(f"{name}: {error}") from error
        save()

    for v in index:
        if v["check"]:
            attempt(v["name"], lambda v=v: result["checks"].extend(bench.check(v)))
    bad = [c for c in result["checks"] if not c["ok"] or not c["same_again"]]
    print(f"{len(result['checks'])} checks, {len(bad)} bad, {len(result['failures'])} failures, "
          f"{time.time() - started:.0f} s")
    for entry in bad[:20]:
        print("  BAD", entry["name"], "t", entry["t"], f"{entry['error']:.2e}", "same", entry["same_again"])
    broken = {(c["name"].split("_")[0], c["name"].split("_")[1]) for c in bad}

    def measure(v: dict[str, Any]) -> None:
        for entry in bench.measure(v):
            result["times"].append(entry)
            TIMES[entry["name"], entry["t"]] = entry["us"]

    rows: dict[str, set[int]] = {}
    for v in index:
        if v["rows"] and time.time() - started < limit * 0.8:
            attempt(v["name"], lambda v=v: measure(v))
            if v["rows"] != [0]:
                rows.setdefault(v["linear"], set()).update(v["rows"])
    bench.weights.clear()
    for linear, seen in rows.items():
        n, k, _ = LINEARS[linear]
        if time.time() - started < limit:
            attempt(f"cublas {linear}", lambda linear=linear, n=n, k=k, seen=seen: result["times"].extend(
                bench.cublas(linear, n, k, sorted(seen))))
    result["checks"] += bench.compared
    bad = [c for c in result["checks"] if not c["ok"] or not c["same_again"]]
    print(f"{len(result['checks'])} checks, {len(bad)} bad", [(c["name"], c["error"]) for c in bad][:20])
    for weight in sorted({v["weight"] for v in index if v["rows"]}):
        if time.time() - started < limit:
            attempt(f"chain {weight}", lambda weight=weight: result["chains"].extend(bench.chains(index, weight)))
    report(result, broken)
    return int(bool(bad or result["failures"]))


def report(result: dict[str, Any], broken: set[tuple[str, str]]) -> None:
    print(result["device"], f"{result['seconds']:.0f} s", result["ceilings"], "broken:", sorted(broken))
    for failure in result["failures"][:10]:
        print("  FAILED", failure["name"], failure["error"][:200])
    best: dict[tuple[str, int, str], dict[str, Any]] = {}
    for entry in result["times"]:
        key = (entry["linear"], entry["t"], f"{entry['weight'] or ''} {entry['family']}")
        if key not in best or entry["us"] < best[key]["us"]:
            best[key] = entry
    for (linear, t, kind), entry in sorted(best.items()):
        library = best.get((linear, t, " cublas"))
        ratio = f"{library['us'] / entry['us']:.2f}x" if library else ""
        marks = " ".join(f"{key[:4]}={value}" for key, value in entry["options"].items()
                         if key not in ("swiglu", "glu", "dependent_launch"))
        print(f"  {linear:10s} t {t:4d} {kind:16s} {entry['us']:7.1f} us {entry['tb_s']:5.2f} TB/s {ratio:6s} {marks}")
    for line in verdicts(result):
        print(" ", line)
    for entry in result["chains"]:
        print(f"  chain {entry['weight']} t {entry['t']} {entry['chain']}: {entry['us']:.1f} us a layer")


def verdicts(result: dict[str, Any]) -> list[str]:
    """For every matmul, format and row count whose rule was timed: whether another kernel was faster."""
    times: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for entry in result["times"]:
        if entry["weight"] and entry["t"]:
            times.setdefault((entry["linear"], entry["t"], entry["weight"]), []).append(entry)
    found = []
    for (linear, t, weight), entries in sorted(times.items()):
        best = min(entries, key=lambda entry: entry["us"])
        for rule in (entry for entry in entries if [entry["name"], t] in result["rules"]):
            verdict = "stays" if rule["us"] <= 1.02 * best["us"] else f"{rule['us'] / best['us']:.2f}x by {best['name']}"
            found.append(f"{linear} t {t} {weight}: rule {rule['us']:.1f} us ({rule['name']}), {verdict}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", choices=SETS, default="all", help="of variants, for build")
    parser.add_argument("--only", default="", metavar="RE",
                        help='of them those whose "MATMUL FORMAT ROWS", as in "8b.o q4_0 16", has this regular expression')
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--limit", type=float, default=120, help="seconds after which nothing new is begun")
    options = parser.parse_args()
    if options.command == "build":
        build(options.folder, only(options.only, SETS[options.set]()))
        return 0
    return run(options.folder, options.out, options.limit)


if __name__ == "__main__":
    sys.exit(main())
