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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

PER_MODULE = 24            # kernels per library: bounds the cost of one compiler run
TOLERANCE = {"bfloat16": 4e-3, "float16": 6e-4, "float32": 3e-5}
REPEATS = 100              # runs of a checked kernel that must have the same bits
SHORT_MS = 2.0             # of a graph: a launch is 1 % of that at most
ROTATE_BYTES = 320 << 20   # weights walked over per replay, several times the L2 cache


def copies_to_rotate(weight_bytes: int) -> int:
    """Copies of a weight to walk over, so that none is still in the cache when its turn comes again."""
    return max(2, min(40, -(-ROTATE_BYTES // weight_bytes)))


# --- building machine -------------------------------------------------------------------------------------------------

def make(variant: dict[str, Any]) -> Any:
    """Variant → PrimFunc named by it."""
    from relaxpack.schedules.kernels.cuda.dequantize import dequantize
    from relaxpack.schedules.kernels.cuda.gemm_few import gemm_few
    from relaxpack.schedules.kernels.cuda.gemm_few_bulk import gemm_few_bulk
    from relaxpack.schedules.kernels.cuda.gemm_few_quant import gemm_few_quant
    from relaxpack.schedules.kernels.cuda.gemm_group_columns import gemm_group_columns
    from relaxpack.schedules.kernels.cuda.gemm_many import gemm_many
    from relaxpack.schedules.kernels.cuda.gemm_mixed import gemm_mixed
    from relaxpack.schedules.kernels.cuda.gemm_rows import gemm_rows
    from relaxpack.schedules.kernels.cuda.gemm_rows_bulk import gemm_rows_bulk
    from relaxpack.schedules.kernels.cuda.gemm_rows_quant import gemm_rows_quant
    from relaxpack.schedules.kernels.cuda.norm import norm
    from relaxpack.weight_format import FORMATS

    from relaxpack.kernel_spec import LinearSpec, NormSpec  # isort: skip
    from relaxpack.schedules.kernels.cuda.linear import linear  # isort: skip

    n, k, dtype, out_dtype, options = (variant[key] for key in ("n", "k", "dtype", "out_dtype", "options"))
    if "swiglu" in options:
        options = {key: value for key, value in options.items() if key != "swiglu"}
        options["glu"] = "swiglu" if variant["options"]["swiglu"] else None
    family, name = variant["family"], variant["name"]
    if family == "dequantize":
        return dequantize(n, k, FORMATS[variant["weight"]], dtype, name=name)
    quantised = {"quant": gemm_rows_quant, "few_quant": gemm_few_quant, "rows_bulk": gemm_rows_bulk, "mixed": gemm_mixed,
                 "few_bulk": gemm_few_bulk, "group_columns": gemm_group_columns}
    if family in quantised:
        return quantised[family](n, k, FORMATS[variant["weight"]], dtype, out_dtype, name=name, **options)
    if family == "norm":
        return norm(NormSpec(k, 1e-5, dtype, options["residual"]), dependent_launch=options["dependent_launch"], name=name)
    if family == "any":
        flags = {key: options[key] for key in ("glu", "bias", "residual")}
        spec = LinearSpec(n, k, FORMATS["bf16" if dtype == "bfloat16" else "f16"],
                          "prefill" if options["prefill"] else "decode", dtype, out_dtype, **flags)
        (stage,) = linear(spec, "sm_90a").stages
        return stage.func.with_attr("global_symbol", name)
    return {"rows": gemm_rows, "few": gemm_few, "many": gemm_many}[family](n, k, dtype, out_dtype, name=name, **options)


def compile_parts(folder: Path, stem: str, makers: Mapping[str, Callable[[], Any]],
                  per_module: int = PER_MODULE) -> dict[str, dict[str, Any]]:
    """Kernels by name into libraries STEM-0.so, STEM-1.so, ...; by name the library and what ptxas says of the kernel."""
    from relaxpack.schedules.cuda_compile import check_library, compile_module, resource_usage
    from relaxpack.target import parse_target

    import tvm  # isort: skip

    folder.mkdir(parents=True, exist_ok=True)
    names, found, started = list(makers), {}, time.time()
    for number, first in enumerate(range(0, len(names), per_module)):
        part = names[first:first + per_module]
        library = folder / f"{stem}-{number}.so"
        executable = compile_module(tvm.IRModule({name: makers[name]() for name in part}), parse_target("cuda:sm_90a"))
        executable.export_library(str(library))
        check_library(library)
        usage = resource_usage(library)
        found |= {name: {"library": library.name, **usage.get(f"{name}_kernel", {})} for name in part}
        print(f"{library.name}: {len(found)} of {len(names)} kernels, {time.time() - started:.0f} s", flush=True)
    return found


def spilling(kernels: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [name for name, used in kernels.items() if used.get("stack", 0) or used.get("local", 0)]


def build(folder: Path, groups: list[str]) -> None:
    from benchmarks.gpu.matmul_variants import group_variants

    for group, variants in group_variants().items():
        if groups and group not in groups:
            continue
        made = compile_parts(folder, group, {v["name"]: partial(make, v) for v in variants})
        (folder / f"{group}.json").write_text(json.dumps([{**v, **made[v["name"]]} for v in variants]))
        spills = spilling(made)
        print(f"{group}: {len(made)} kernels, {len(spills)} with a stack frame {spills[:6]}")


# --- GPU machine ------------------------------------------------------------------------------------------------------

def exact(x: Any, weight: Any, bias: Any, residual: Any, swiglu: bool, in_order: bool) -> Any:
    """float64 of a matmul and its epilogue. Packed rows are blocks of 8 gate rows and 8 up rows, biases too; `in_order`: the
    weight has that order already."""
    n, t = len(weight), len(x)
    z = x.double() @ weight.double().T
    if swiglu and not in_order:
        z = z.reshape(t, 2, n // 16, 8).transpose(1, 2).reshape(t, n)
    if bias is not None:
        z = z + bias.double()
    if swiglu:
        pairs = z.reshape(t, n // 16, 2, 8)
        gate, up = pairs[:, :, 0].reshape(t, n // 2), pairs[:, :, 1].reshape(t, n // 2)
        z = gate * gate.sigmoid() * up
    return z if residual is None else z + residual.double()


class Bench:
    """Calls kernels of exported libraries on torch tensors, checks and times them."""

    device = "cuda"
    lead_in = False

    def __init__(self, folder: Path) -> None:
        import relaxpack.tvm_setup as setup

        setup.load_cuda_runtime()
        import torch

        import tvm
        import tvm_ffi

        self.torch, self.tvm, self.ffi, self.folder = torch, tvm, tvm_ffi, folder
        self.modules: dict[str, Any] = {}
        self.generator = torch.Generator(device="cuda").manual_seed(1)
        self.weights: dict[Any, Any] = {}

    def kernel(self, variant: dict[str, Any]) -> Any:
        library = variant["library"]
        if library not in self.modules:
            self.modules[library] = self.tvm.runtime.load_module(str(self.folder / library))
        return self.modules[library][variant["name"]]

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()

    def random(self, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
        value = self.torch.randn(shape, generator=self.generator, device="cuda") * scale
        return value.to(getattr(self.torch, dtype))

    def captured(self, calls: list[Any]) -> Callable[[], float]:
        """Replays `calls` as one graph and answers with the microseconds of one of them. With `lead_in` a short graph runs
        once before, so that the host gets ahead and no launch is part of the time."""
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), self.ffi.use_raw_stream(self.tvm_device(), stream.cuda_stream):
            calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream), self.ffi.use_raw_stream(self.tvm_device(), stream.cuda_stream):
            for call in calls:
                call()

        short = self.lead_in

        def replay() -> float:
            nonlocal short
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if short:
                graph.replay()
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            took = float(begin.elapsed_time(end))
            short = short and took < SHORT_MS
            return took * 1e3 / len(calls)

        return replay

    def time(self, calls: list[Any], replays: int = 7) -> float:
        """Median microseconds of one call, after one replay that does not count."""
        replay = self.captured(calls)
        replay()
        return sorted(replay() for _ in range(replays))[replays // 2]

    def tvm_device(self) -> Any:
        return self.ffi.device("cuda:0")

    def packed(self, variant: dict[str, Any], copies: int, seed: int = 0) -> tuple[list[list[Any]], Any]:
        """Copies of the weight buffers, and for quantised weights the canonical tensor of small shapes (else None)."""
        import numpy as np

        torch, n, k = self.torch, variant["n"], variant["k"]
        if variant["weight"] is None:
            first = self.random((n, k), variant["dtype"], k ** -0.5)
            return [[first if i == 0 else first.clone()] for i in range(copies)], None
        from relaxpack.schedules.kernels.cuda.packing import pack, weight_layout
        from relaxpack.weight_format import FORMATS, QuantizedTensor

        fmt, swiglu = FORMATS[variant["weight"]], variant["options"].get("swiglu", False)
        layout = weight_layout(fmt, n, k, swiglu)
        if n * k > 1 << 22:                 # random bytes, small scales
            sets = []
            for _ in range(copies):
                buffers = []
                for suffix, shape, dtype in layout.buffers:
                    if suffix == "codes":
                        random = torch.randint(-2**31, 2**31, shape, device="cuda", dtype=torch.int64).to(torch.int32)
                        buffers.append(random & ~0x40404040 if fmt.e4m3 else random)        # no NaN
                    elif dtype == "uint32":         # scale and zero
                        word = int(np.float16(0.01).view(np.uint16)) | 8 << 16
                        buffers.append(torch.full(shape, word, device="cuda", dtype=torch.int32))
                    else:
                        small = torch.rand(shape, generator=self.generator, device="cuda") * 0.01 + 0.005
                        buffers.append(small.to(getattr(torch, dtype)))
                sets.append(buffers)
            return sets, None
        rng = np.random.default_rng(seed)
        span = {"q4_0": (0, 16), "q4_1": (0, 16), "q4_k": (0, 16), "q4_128": (0, 16), "q5_0": (-16, 16),
                "q5_1": (0, 32), "q5_k": (0, 32), "q6_k": (-32, 32), "q8_0": (-128, 128), "fp8": (0, 127),
                "fp8_block": (0, 127)}[fmt.name]
        groups, sign = (n, fmt.groups(k)), rng.integers(0, 2, (n, k)) * 128 if fmt.e4m3 else 0
        canonical = QuantizedTensor(
            fmt, (rng.integers(*span, (n, k)) + sign).astype(np.int8 if fmt.signed else np.uint8),
            ((rng.random(groups) * 0.02 + 0.001) * (0.1 if fmt.e4m3 else 1)).astype(fmt.scale_dtype),
            (rng.standard_normal(groups) * 0.05).astype(fmt.scale_dtype) if fmt.minimum == "stored" else None,
            rng.integers(0, 16, groups).astype(np.uint8) if fmt.zeros else None)
        buffers = [torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).cuda()
                   for array in pack(layout, canonical).values()]
        return [buffers] * copies, canonical

    def view(self, tensor: Any) -> Any:
        """torch has few uint32 operations: codes are int32 here and travel to TVM as uint32 views."""
        return tensor.view(self.torch.uint32) if tensor.dtype == self.torch.int32 else tensor

    # numerics

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

    def verdict(self, variant: dict[str, Any], t: int, out: Any, reference: Any) -> dict[str, Any]:
        error = float((out.double() - reference).norm() / reference.norm())
        return {"name": variant["name"], "t": t, "error": error, "ok": error < TOLERANCE[variant["out_dtype"]]}

    # times

    def measure(self, variant: dict[str, Any]) -> list[dict[str, Any]]:
        torch, n, k, options = self.torch, variant["n"], variant["k"], variant["options"]
        fn, rows, found = self.kernel(variant), variant["rows"], []
        if variant["family"] == "norm":
            for t in rows:
                us = self.time([self.norm_call(variant, t)[0] for _ in range(20)])
                found.append({"name": variant["name"], "linear": variant["linear"], "family": "norm", "weight": None, "t": t,
                              "us": us, "options": options, "tb_s": 8 * t * k / us / 1e6, "tflop_s": 0.0})
            return found
        key = (variant["linear"], variant["weight"])
        if key not in self.weights:
            self.weights.clear()
            torch.cuda.empty_cache()
            one = int(self.weight_bytes(variant))
            self.weights[key] = self.packed(variant, copies_to_rotate(one))[0]
        copies = self.weights[key]
        width = n // 2 if options.get("swiglu") else n
        for t in rows:
            if variant["family"] == "dequantize":
                out = torch.empty((n, k), device="cuda", dtype=getattr(torch, variant["dtype"]))
                us = self.time([partial(fn, *[self.view(c) for c in b], out) for b in copies])
            else:
                x = self.random((t, k), variant["dtype"])
                y = torch.empty((t, width), device="cuda", dtype=getattr(torch, variant["out_dtype"]))
                used = copies if t <= 256 else copies[:4]
                us = self.time([partial(fn, x, *[self.view(c) for c in b], y) for b in used])
            found.append({"name": variant["name"], "linear": variant["linear"], "family": variant["family"],
                          "weight": variant["weight"], "t": t, "us": us, "options": options,
                          "tb_s": self.weight_bytes(variant) / us / 1e6, "tflop_s": 2 * t * n * k / us / 1e6})
        return found

    def weight_bytes(self, variant: dict[str, Any]) -> float:
        from relaxpack.weight_format import FORMATS

        return variant["n"] * variant["k"] * (FORMATS[variant["weight"]].bytes_per_weight() if variant["weight"] else 2)

    def cublas(self, linear: str, n: int, k: int, rows: list[int]) -> list[dict[str, Any]]:
        """The bare product through torch, same rotation."""
        torch, found = self.torch, []
        copies = [self.random((n, k), "bfloat16", k ** -0.5)]
        copies += [copies[0].clone() for _ in range(copies_to_rotate(2 * n * k) - 1)]
        for t in rows:
            x = self.random((t, k), "bfloat16")
            used = copies if t <= 256 else copies[:4]
            us = self.time([partial(torch.nn.functional.linear, x, w) for w in used])
            found.append({"name": "cublas", "linear": linear, "family": "cublas", "weight": None, "t": t, "us": us,
                          "options": {}, "tb_s": 2 * n * k / us / 1e6, "tflop_s": 2 * t * n * k / us / 1e6})
        return found

    def ceilings(self) -> dict[str, float]:
        torch = self.torch
        big = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
        read = self.time([lambda: torch.sum(big, dtype=torch.float32)])
        a, b = (self.random((8192, 8192), "bfloat16") for _ in range(2))
        gemm = self.time([lambda: a @ b])
        return {"read_tb_s": 2 * (1 << 30) / read / 1e6, "gemm_tflop_s": 2 * 8192**3 / gemm / 1e6}


def run_group(folder: Path, group: str, out: Path) -> None:
    started = time.time()
    bench = Bench(folder)
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
