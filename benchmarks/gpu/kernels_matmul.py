"""Checks and times the CUDA matmul kernels on one GPU, beside cuBLAS (torch) in the same run.

    python -m benchmarks.gpu.kernels_matmul build .carry/matmul [GROUP...]       # anywhere with nvcc, no GPU needed
    python benchmarks/gpu/kernels_matmul.py run .carry/matmul --out DIR [GROUP...]   # on the GPU: TVM runtime and torch

Numbers first: every kernel against float64 with poisoned outputs. Times are replays of a graph that walks over copies of
the weight larger than the L2 cache. Every group runs in a process of its own with a time limit, so that a kernel that
hangs costs one group. Writes DIR/matmul-GROUP.json and prints a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.kernel_libraries import compile_parts, spilling
from benchmarks.gpu.matmul_bench import Bench, exact
from benchmarks.gpu.matmul_variants import group_variants, make

REPEATS = 100              # runs of a checked kernel that must have the same bits


# --- building machine -------------------------------------------------------------------------------------------------

def build(folder: Path, groups: list[str]) -> None:
    for group, variants in group_variants().items():
        if groups and group not in groups:
            continue
        made = compile_parts(folder, group, {v["name"]: partial(make, v) for v in variants})
        (folder / f"{group}.json").write_text(json.dumps([{**v, **made[v["name"]]} for v in variants]))
        spills = spilling(made)
        print(f"{group}: {len(made)} kernels, {len(spills)} with a stack frame {spills[:6]}")


# --- GPU machine ------------------------------------------------------------------------------------------------------

class GroupBench(Bench):
    """`Bench` that also compares kernels with float64, and knows norms and the chains of a layer."""

    def check(self, variant: dict[str, Any]) -> list[dict[str, Any]]:
        torch, n, k, options = self.torch, variant["n"], variant["k"], variant["options"]
        fn, found = self.kernel(variant), []
        if variant["family"] == "norm":
            return [self.check_norm(variant, t) for t in variant["check"]]
        (buffers,), canonical = self.packed(variant, 1)
        plain = torch.from_numpy(canonical.dequantize()).cuda() if canonical else buffers[0]
        if variant["family"] == "dequantize":
            out = torch.full((n, k), float("nan"), device="cuda", dtype=getattr(torch, variant["dtype"]))
            fn(*[self.view(b) for b in buffers], out)
            return [self.verdict(variant, 0, out, plain.double())]
        swiglu, out_dtype = options.get("swiglu", False), variant["out_dtype"]
        width = n // 2 if swiglu else n
        bias = self.random((n,), "float32") if options.get("bias") else None
        for t in variant["check"]:
            x = self.random((t, k), variant["dtype"])
            residual = self.random((t, width), variant["dtype"]) if options.get("residual") else None
            y = torch.full((t, width), float("nan"), device="cuda", dtype=getattr(torch, out_dtype))
            given = [x, *map(self.view, buffers), *(extra for extra in (bias, residual) if extra is not None)]
            fn(*given, y)
            z = exact(x, plain, bias, residual, swiglu, in_order=canonical is None)
            found.append(self.verdict(variant, t, y, z))
            again, different = torch.empty_like(y), torch.zeros((), device="cuda", dtype=torch.bool)
            for _ in range(REPEATS):
                fn(*given, again)
                different |= (y != again).any()
            found[-1]["same_again"] = not different.item()
        return found

    def norm_call(self, variant: dict[str, Any], t: int) -> tuple[Any, list[Any]]:
        torch, h = self.torch, variant["k"]
        x, before = self.random((t, h), variant["dtype"], 3.0), self.random((t, h), variant["dtype"])
        weight = self.random((h,), "float32")
        total, y = (torch.full((t, h), float("nan"), device="cuda", dtype=x.dtype) for _ in range(2))
        fn = self.kernel(variant)
        tensors = [x, before, weight, total, y] if variant["options"]["residual"] else [x, weight, y]
        return (lambda: fn(*tensors)), [x, before, weight, total, y]

    def check_norm(self, variant: dict[str, Any], t: int) -> dict[str, Any]:
        call, (x, before, weight, total, y) = self.norm_call(variant, t)
        call()
        summed = (x + before) if variant["options"]["residual"] else x
        wide = summed.double()
        reference = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        verdict = self.verdict(variant, t, y, reference)
        if variant["options"]["residual"]:
            verdict["ok"] &= bool(self.torch.equal(total, summed))
        return verdict

    def measure(self, variant: dict[str, Any]) -> list[dict[str, Any]]:
        if variant["family"] != "norm":
            return super().measure(variant)
        found = []
        for t in variant["rows"]:
            us = self.time([self.norm_call(variant, t)[0] for _ in range(20)])
            found.append({"name": variant["name"], "linear": variant["linear"], "family": "norm", "weight": None, "t": t,
                          "us": us, "options": variant["options"], "tb_s": 8 * t * variant["k"] / us / 1e6, "tflop_s": 0.0})
        return found

    def chain(self, index: list[dict[str, Any]], layers: int = 12) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(checks, times) of norm, qkv, o, norm, gate_up, down over layers of their own weights, every kernel reading what
        the one before wrote. Dependent launch must not change a bit of the result."""
        torch, checks, times = self.torch, [], []
        for model, h in (("1b", 2048), ("8b", 4096)):
            mine = [v for v in index if v.get("chain") and v["linear"].startswith(model)]
            shapes = {v["linear"].split(".")[1]: (v["n"], v["k"]) for v in mine if v["family"] != "norm"}
            weights = [{part: self.random((n, k), "bfloat16", k ** -0.5) for part, (n, k) in shapes.items()}
                       for _ in range(layers)]
            scale = torch.ones(h, device="cuda")
            total_bytes = layers * sum(2 * n * k for n, k in shapes.values())
            for rows in sorted({t for v in mine for t in v["chain"]}):
                start, results = self.random((rows, h), "bfloat16"), []
                for pdl in (False, True):
                    run = {v["linear"].split(".")[1]: self.kernel(v) for v in mine
                           if rows in v["chain"] and v["options"]["dependent_launch"] == pdl}
                    x, residual, calls = start, torch.zeros_like(start), []
                    for layer in weights:
                        for first, second in (("qkv", "o"), ("gate_up", "down")):
                            total, y, out = (torch.empty_like(start) for _ in range(3))
                            calls.append(partial(run["norm"], x, residual, scale, total, y))
                            width = shapes[first][0] // (2 if first == "gate_up" else 1)
                            middle = torch.empty((rows, width), device="cuda", dtype=x.dtype)
                            calls.append(partial(run[first], y, layer[first], middle))
                            if width != shapes[second][1]:          # qkv: its first columns stand for attention's result
                                part = middle[:, :h] if rows == 1 else torch.empty_like(start)
                                if rows > 1:
                                    calls.append(partial(part.copy_, middle[:, :h]))
                                middle = part
                            calls.append(partial(run[second], middle, layer[second], out))
                            x, residual = out, total
                    us = self.time(calls) * len(calls)
                    results.append(x.clone())
                    times.append({"name": f"chain {model} {rows} rows, dependent {int(pdl)}", "linear": f"{model}.layer",
                                  "family": f"chain{int(pdl)}", "weight": None, "t": rows, "us": us / layers, "options": {},
                                  "tb_s": total_bytes / us / 1e6, "tflop_s": 0.0})
                same = bool(torch.equal(*results)) and bool(results[0].isfinite().all())
                checks.append({"name": f"chain {model}", "t": rows, "error": 0.0 if same else 1.0, "ok": same})
        return checks, times


def run_group(folder: Path, group: str, out: Path) -> None:
    started = time.time()
    bench = GroupBench(folder)
    index = json.loads((folder / f"{group}.json").read_text())
    result: dict[str, Any] = {"group": group, "device": bench.torch.cuda.get_device_name(), "checks": [], "times": [],
                              "failures": [], "ceilings": bench.ceilings()}

    def save() -> None:
        result["seconds"] = time.time() - started
        (out / f"matmul-{group}.json").write_text(json.dumps(result))

    rows: dict[tuple[str, int, int], set[int]] = {}
    for number, variant in enumerate(index):
        try:
            if variant["check"]:
                result["checks"] += bench.check(variant)
            if variant["rows"]:
                result["times"] += bench.measure(variant)
                if variant["family"] not in ("dequantize", "norm"):
                    rows.setdefault((variant["linear"], variant["n"], variant["k"]), set()).update(variant["rows"])
            bench.torch.cuda.synchronize()
        except Exception as error:   # one broken kernel must not hide the others; it is reported and fails the run
            result["failures"].append({"name": variant["name"], "error": f"{type(error).__name__}: {error}"[:500]})
            if ("CUDA" in str(error) and "illegal" in str(error).lower()) or "unspecified launch" in str(error):
                break
        if number % 10 == 9:
            save()
    bench.weights.clear()
    if group == "chain":
        checks, times = bench.chain(index)
        result["checks"] += checks
        result["times"] += times
    if not result["failures"] or result["times"]:
        for (linear, n, k), seen in rows.items():
            result["times"] += bench.cublas(linear, n, k, sorted(seen))
    save()


def table(result: dict[str, Any]) -> None:
    bad = [c for c in result["checks"] if not c["ok"] or c.get("same_again") is False]
    ceilings = ", ".join(f"{name} {value:.2f}" for name, value in result["ceilings"].items())
    print(f"[{result['group']}] {result['device']} {result['seconds']:.0f} s, {len(result['checks'])} checks, "
          f"{len(bad)} bad, {len(result['failures'])} failures, ceilings {ceilings}")
    for entry in bad[:25]:
        print("  BAD", entry["name"], "t", entry["t"], f"{entry['error']:.2e}", "same", entry.get("same_again"))
    for entry in result["failures"][:10]:
        print("  FAILED", entry["name"], entry["error"][:160])
    best: dict[tuple[str, int, str], dict[str, Any]] = {}
    for entry in result["times"]:
        key = (entry["linear"], entry["t"], entry["family"] + (entry["weight"] or ""))
        if key not in best or entry["us"] < best[key]["us"]:
            best[key] = entry
    for (linear, t, kind), entry in sorted(best.items()):
        library = best.get((linear, t, "cublas"))
        ratio = f"{library['us'] / entry['us']:.2f}x" if library else ""
        marks = " ".join(f"{k[:6]}={int(v)}" for k, v in entry["options"].items() if k not in ("swiglu", "dependent_launch"))
        print(f"  {linear:11s} t {t:5d} {kind:12s} {entry['us']:8.1f} us {entry['tb_s']:6.2f} TB/s "
              f"{entry['tflop_s']:5.0f} TF/s {ratio:6s} {marks}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run", "run-group"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--limit", type=int, default=150, help="seconds per group")
    options = parser.parse_intermixed_args()
    if options.command == "build":
        build(options.folder, options.groups)
        return 0
    if options.command == "run-group":
        run_group(options.folder, options.groups[0], options.out)
        return 0
    status = 0
    for group in options.groups or sorted(p.stem for p in options.folder.glob("*.json")):
        command = [sys.executable, __file__, "run-group", str(options.folder), group, "--out", str(options.out)]
        try:
            done = subprocess.run(command, timeout=options.limit)
            status |= done.returncode
        except subprocess.TimeoutExpired:
            print(f"[{group}] ran past {options.limit} s and was stopped")
            status |= 1
        path = options.out / f"matmul-{group}.json"
        if path.exists():
            result = json.loads(path.read_text())
            status |= bool(result["failures"]) or any(not c["ok"] for c in result["checks"])
            table(result)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
