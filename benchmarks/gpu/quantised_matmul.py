"""Checks and times the matmuls of quantised weights on one GPU, variants side by side, and cuBLAS in bf16 in the same run.

    python -m benchmarks.gpu.quantised_matmul build FOLDER                            # anywhere with nvcc, no GPU needed
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

from benchmarks.gpu.kernels_matmul import TOLERANCE, Bench, compile_parts, exact, spilling
from benchmarks.gpu.matmul_variants import LINEARS

PER_MODULE = 16
CHAIN_PARTS = ("qkv", "o", "gate_up", "down")
CHAIN_LAYERS = 8
SAME = 6e-3             # a bf16 result against the weight rounded to bf16


def variant(family: str, linear: str, weight: str | None, rows: tuple[int, ...], *, dtype: str = "bfloat16",
            out_dtype: str | None = None, shape: tuple[int, int] | None = None, check: tuple[int, ...] = (),
            **options: Any) -> dict[str, Any]:
    n, k, gated = (*shape, False) if shape else LINEARS[linear]
    if gated:
        options["glu"] = "swiglu"
    if linear.endswith("head"):
        out_dtype = "float32"
    marks = "_".join(f"{key[:3]}{value if isinstance(value, str) else int(value)}" for key, value in options.items())
    name = "_".join(filter(None, [family, weight or "", f"{n}x{k}", dtype[:2], (out_dtype or dtype)[:2], marks]))
    return {"name": name, "family": family, "linear": linear, "n": n, "k": k, "weight": weight, "dtype": dtype,
            "out_dtype": out_dtype or dtype, "rows": list(rows), "check": list(check), "options": options}


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


# --- what is built ----------------------------------------------------------------------------------------------------

def check_variants() -> list[dict[str, Any]]:
    found = []
    few = (1, 3, 8, 9, 17, 33, 64, 65, 130, 200)
    for weight in ("q4_0", "q4_1", "q4_k", "q4_128", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0", "fp8", "fp8_block"):
        convert = {"convert": True} if weight.startswith("fp8") else {}
        pdl = {"dependent_launch": True}
        if weight in ("q4_0", "q4_1", "q4_k"):
            found += [variant("groups", "check", weight, (), shape=(1072, 1088), check=few[:5], out_dtype="float32", **pdl),
                      variant("groups", "check", weight, (), shape=(1072, 2048), check=few[:5], out_dtype="float32",
                              columns=2, dtype="float16", warps=4, unroll=2, ahead=True, bias=True, glu="swiglu",
                              residual=True, **pdl)]
        found += [
            variant("fewbulk", "check", weight, (), shape=(1072, 576), check=few, out_dtype="float32", columns=16),
            variant("fewbulk", "check", weight, (), shape=(1072, 2048), check=few, out_dtype="float32", columns=64, warps=3,
                    groups=2, split=3, residual=True, scaled=True, **pdl),
            variant("fewbulk", "check", weight, (), shape=(1072, 1088), check=few, dtype="float16", out_dtype="float32",
                    columns=32, warps=3, strips=1, groups=2, split=4, blocks_per_sm=2, bias=True, glu="swiglu", **pdl,
                    **convert),
            variant("fewbulk", "check", weight, (), shape=(1072, 2048), check=few, out_dtype="float32", columns=24, warps=7,
                    strips=2, groups=1, glu="swiglu", bias=True, residual=True, **pdl),
            variant("mixed", "check", weight, (), shape=(1072, 576), check=few, out_dtype="float32", columns=16),
            variant("mixed", "check", weight, (), shape=(1072, 2048), check=few, out_dtype="float32", columns=64, strips=2,
                    split=3, blocks_per_sm=1, residual=True, **pdl),
            variant("mixed", "check", weight, (), shape=(1072, 1088), check=few, dtype="float16", out_dtype="float32",
                    columns=32, split=4, bias=True, glu="swiglu", **pdl, **convert),
            variant("bulk", "check", weight, (), shape=(1072, 1088), check=few[:5], out_dtype="float32", **pdl),
            variant("bulk", "check", weight, (), shape=(1072, 2048), check=few[:5], out_dtype="float32", dtype="float16",
                    columns=16, warps=4, unroll=2, stages=3, bias=True, glu="swiglu", residual=True, **pdl, **convert)]
    found += [variant("mixed", "check", "q4_1", (), shape=(1072, 2048), check=few, out_dtype="float32", columns=128,
                      blocks_per_sm=1, consumers=2, glu="swiglu", bias=True, residual=True),
              variant("mixed", "check", "q4_0", (), shape=(1072, 2048), check=few, columns=256, blocks_per_sm=1),
              variant("mixed", "check", "q4_0", (), shape=(1072, 2048), check=few, out_dtype="float32", columns=64,
                      blocks_per_sm=1, consumers=4, split=2, dependent_launch=True),
              variant("mixed", "check", "q8_0", (), shape=(1072, 2048), check=few[:5], columns=8, consumers=1, split=8)]
    return found


# warps, strips, groups, split, blocks_per_sm of gemm_few_bulk, by matmul and rows of x (at most)
FEW_BULK = {
    ("8b.gate_up", 16): [(4, 2, 2, 1, 2), (4, 2, 1, 1, 2), (7, 2, 3, 1, 1)],
    ("8b.gate_up", 32): [(4, 2, 1, 1, 2)],
    ("8b.qkv", 16): [(3, 1, 5, 1, 1), (3, 1, 7, 1, 1), (1, 3, 7, 1, 1), (1, 3, 11, 1, 1)],
    ("8b.qkv", 32): [(3, 1, 5, 1, 1), (3, 1, 7, 1, 1)],
    ("8b.qkv", 64): [(3, 1, 5, 1, 1), (3, 1, 4, 1, 1)],
    ("8b.o", 16): [(2, 1, 7, 1, 1), (2, 1, 11, 1, 1), (2, 2, 5, 2, 1)],
    ("8b.o", 32): [(2, 2, 3, 2, 1), (2, 1, 7, 1, 1)],
    ("8b.o", 64): [(2, 1, 5, 1, 1), (2, 1, 6, 1, 1), (4, 1, 3, 2, 1), (2, 2, 3, 2, 1)],
    ("8b.down", 16): [(4, 2, 1, 4, 2), (2, 1, 11, 1, 1), (2, 1, 7, 1, 1), (2, 2, 7, 2, 1), (4, 1, 5, 2, 1), (4, 2, 2, 4, 2)],
    ("8b.down", 32): [(2, 2, 3, 2, 1), (2, 1, 7, 1, 1), (4, 1, 3, 2, 1)],
    ("8b.down", 64): [(2, 2, 3, 2, 1), (2, 1, 6, 1, 1), (4, 1, 3, 2, 1)]}


def few_bulk_variants(linear: str, weight: str, columns: int) -> list[dict[str, Any]]:
    shapes = FEW_BULK.get((linear, columns), [])
    return [variant("fewbulk", linear, weight, (columns,), columns=columns, warps=w, strips=r, groups=g, split=s,
                    blocks_per_sm=b, scaled=scaled, dependent_launch=True)
            for w, r, g, s, b in (shapes if weight == "q4_0" else shapes[:2] if columns == 16 else shapes[:3:2])
            for scaled in ((True, False) if columns == 64 and weight == "q4_0" else (columns == 64,))]


def group_variants(linear: str, weight: str) -> list[dict[str, Any]]:
    """1 to 4 rows: eight rows as columns of the product against fewer rows times groups."""
    from relaxpack.schedules.kernels.cuda.linear import rows_tiling
    from relaxpack.schedules.kernels.cuda.quantized_tilings import group_columns_tiling
    from relaxpack.weight_format import FORMATS

    n, k, _ = LINEARS[linear]
    groups = [variant("groups", linear, weight, (rows,), dependent_launch=True, **group_columns_tiling(n, k, rows))
              for rows in (1, 2, 4)]
    return [variant("rows", linear, weight, (1, 2, 4), dependent_launch=True, columns=8,
                    **rows_tiling(n, k, FORMATS[weight])), *groups]


def timed_variants() -> list[dict[str, Any]]:
    from relaxpack.schedules.kernels.cuda.quantized_tilings import mixed_tiling
    from relaxpack.weight_format import FORMATS

    found = []
    for linear in ("8b.gate_up", "8b.o", "8b.down", "8b.qkv"):
        n, k, _ = LINEARS[linear]
        for weight in ("q4_0", "q4_1", "q4_128", "q8_0", "fp8"):
            found.append(variant("dequantize", linear, weight, (0,)))
            if weight in ("q4_0", "q4_1"):
                found += group_variants(linear, weight)
            for columns in (16, 32, 64) if weight == "q4_0" else (16, 64):
                found += few_bulk_variants(linear, weight, columns)
                found.append(variant("mixed", linear, weight, (columns,), dependent_launch=True,
                                     **mixed_tiling(n, k, columns, FORMATS[weight])))
        found += [variant("bulk", linear, "q4_0", (16,), columns=16, warps=w, unroll=u, stages=s, blocks_per_sm=b,
                          dependent_launch=True) for w, u, s, b in ((8, 2, 4, 2), (16, 2, 2, 1)) if n <= 8192]
    return found


def all_variants() -> list[dict[str, Any]]:
    """Without duplicates; a kernel that is wanted for several row counts is built once."""
    found: dict[str, dict[str, Any]] = {}
    for entry in [*check_variants(), *timed_variants()]:
        known = found.setdefault(entry["name"], {**entry, "rows": []})
        known["rows"] += [t for t in entry["rows"] if t not in known["rows"]]
    found.update({"norm4096": {"name": "norm4096", "family": "norm", "linear": "8b.norm", "n": 1, "k": 4096, "weight": None,
                               "dtype": "bfloat16", "out_dtype": "bfloat16", "rows": [], "check": [], "options": {}}})
    return list(found.values())


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
    made = compile_parts(folder, "quantised", {v["name"]: partial(make, v) for v in variants}, PER_MODULE)
    (folder / "index.json").write_text(json.dumps([{**v, **made[v["name"]]} for v in variants]))
    for name in spilling(made):
        print("stack frame:", name, made[name].get("stack"), made[name].get("local"))


# --- GPU machine ------------------------------------------------------------------------------------------------------

class QuantisedBench(Bench):
    """`Bench` whose references know what `mixed` kernels make of a weight."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.plain: dict[Any, Any] = {}         # the unpacked weight of what is measured
        self.compared: list[dict[str, Any]] = []

    def reference(self, v: dict[str, Any], canonical: Any, x: Any, bias: Any, residual: Any) -> Any:
        scaled = v["family"] == "mixed" or v["options"].get("scaled")
        plain = scaled_weights(canonical, v["dtype"]) if scaled else canonical.dequantize()
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
        """A kernel whose result is not what the unpacked weight (16 bits) gives is not timed."""
        gated = LINEARS[variant["linear"]][2]
        variant = {**variant, "options": {**variant["options"], "swiglu": gated}}
        key = (variant["linear"], variant["weight"])
        found: list[dict[str, Any]] = super().measure(variant | {"rows": variant["rows"] if variant["rows"] == [0] else []})
        if variant["rows"] == [0]:
            n, k, weight = variant["n"], variant["k"], self.weights[key][0]
            self.plain = {key: self.torch.empty((n, k), device="cuda", dtype=self.torch.bfloat16)}
            self.kernel(variant)(*[self.view(c) for c in weight], self.plain[key])
            return found
        for t in variant["rows"]:
            x = self.random((t, variant["k"]), variant["dtype"])
            y = self.torch.full((t, variant["n"] // 2 if gated else variant["n"]), float("nan"), device="cuda",
                                dtype=getattr(self.torch, variant["out_dtype"]))
            self.kernel(variant)(x, *[self.view(c) for c in self.weights[key][0]], y)
            if key in self.plain:
                z = exact(x, self.plain[key], None, None, gated, in_order=True)
                error = float((y.double() - z).norm() / z.norm())
                good = error < SAME
                self.compared.append({"name": variant["name"], "t": t, "error": error, "ok": good, "same_again": True})
                if good:
                    found += super().measure(variant | {"rows": [t]})
        return found

    def chains(self, index: list[dict[str, Any]], weight: str) -> list[dict[str, Any]]:
        """One 8B layer's norms and matmuls, dependent launch, each kernel reading what the one before wrote: for every
        family the fastest of its variants at that row count."""
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
    """Row count → label → kernel by part: the best of each family and of all."""
    found = []
    for rows, families in ((16, ("fewbulk", "mixed")), (64, ("fewbulk", "mixed"))):
        choices = {}
        for label in (*families, "best"):
            wanted = families if label == "best" else (label,)
            best = {}
            for part in CHAIN_PARTS:
                timed = [(TIMES[v["name"], rows], v["name"]) for v in index if v["linear"] == f"8b.{part}"
                         and v["weight"] == weight and v["family"] in wanted and (v["name"], rows) in TIMES]
                if timed:
                    best[part] = min(timed)[1]
            if len(best) == len(CHAIN_PARTS):
                choices[label] = best
        found.append((rows, choices))
    return found


def run(folder: Path, out: Path, limit: float) -> int:
    started = time.time()
    bench = QuantisedBench(folder)
    index = json.loads((folder / "index.json").read_text())
    result: dict[str, Any] = {"device": bench.torch.cuda.get_device_name(), "checks": [], "times": [], "chains": [],
                              "failures": [], "ceilings": bench.ceilings()}

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
    for weight in ("q4_1", "q4_0", "q4_128"):
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
    for entry in result["chains"]:
        print(f"  chain {entry['weight']} t {entry['t']} {entry['chain']}: {entry['us']:.1f} us a layer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--limit", type=float, default=120, help="seconds after which nothing new is begun")
    options = parser.parse_args()
    if options.command == "build":
        build(options.folder, all_variants())
        return 0
    return run(options.folder, options.out, options.limit)


if __name__ == "__main__":
    sys.exit(main())
