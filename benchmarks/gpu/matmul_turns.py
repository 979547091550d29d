"""Tilings of the Hopper matmuls against each other and cuBLAS (torch), in turns, so that all see the same clocks.

    python -m benchmarks.gpu.matmul_turns build FOLDER                              # anywhere with nvcc, no GPU needed
    python benchmarks/gpu/matmul_turns.py run FOLDER --out OUT.json --limit 90      # on the GPU: TVM's runtime and torch

An item is one matmul of one model at one number of rows. Every kernel is first compared with float64 (poisoned output, an
odd number of rows) and, at the rows it is timed at, with cuBLAS. Times are medians of rounds in which every candidate of
the item replays its graph once, over rotated weights; each round begins with another candidate, because the first of a
round finds the coolest chip. The items run in a child that writes its results after each; one
that hangs or dies is restarted without the kernel it was at. `prelude` tells how many clusters of each size fit the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.kernel_libraries import compile_parts, spilling
from benchmarks.gpu.matmul_bench import Bench, copies_to_rotate
from benchmarks.gpu.matmul_variants import LINEARS, make, variant

CHECK_ROWS = 200
DEFAULTS = {"split": 1, "cluster": 1, "skew": 0}            # of gemm_many and gemm_few: not said in names
STUCK = 25.0                                                # seconds without progress


# ---- candidates ----

def few_candidates(n: int, k: int, rows: int) -> Iterator[dict[str, Any]]:
    """gemm_few with the most and the second most pieces of K that one wave of clusters has room for."""
    from relaxpack.schedules.kernels.cuda.linear_rules import CLUSTERS

    columns = min(-(-rows // 8) * 8, 64)
    for consumers in (1, 2) if rows <= 64 else (1,):
        strips = -(-n // (64 * consumers)) * -(-rows // columns)
        splits = [split for split in range(1, 7) if strips <= CLUSTERS[split] and k // 64 // split >= 4]
        for split in splits[-2:]:
            yield {"family": "few", "columns": columns, "consumers": consumers, "split": split, "share": 1,
                   "blocks_per_sm": 1}


def candidates(linear: str, rows: int) -> Iterator[dict[str, Any]]:
    """What the rule takes first, then the width and split that its estimate puts next if they are close, longer walks for
    many rows, and for few rows strips of 64 and 128 weight rows."""
    from relaxpack.schedules.kernels.cuda.linear_rules import TILE_WIDTHS, hopper_plan, many_estimate
    from relaxpack.schedules.kernels.cuda.many_tile import divides

    n, k, _ = LINEARS[linear]
    family, options = hopper_plan(n, k, rows, False)
    yield {"family": family.removeprefix("gemm_"), **options}
    if rows <= 128:
        yield from few_candidates(n, k, rows)
    if rows < 128:
        return
    ranked = sorted((many_estimate(n, k, rows, width, split), width, split)
                    for width in TILE_WIDTHS for split in (1, 2, 3, 4)
                    if divides(width, split, False) and k // 64 // split >= 4)
    others = [{"family": "many", "tile_n": width, "split": split} for estimate, width, split in ranked[:4]
              if estimate < 1.1 * ranked[0][0]]
    yield from (one for one in others[:2] if rows <= 1024)
    if family == "gemm_many" and rows >= 2048:
        yield {"family": "many", **options, "group_m": 16}


def epilogue_candidates(linear: str, rows: int) -> Iterator[dict[str, Any]]:
    from relaxpack.schedules.kernels.cuda.linear_rules import hopper_plan

    n, k, swiglu = LINEARS[linear]
    flag = {"swiglu": True} if swiglu else {"residual": True}
    family, options = hopper_plan(n, k, rows, swiglu)
    yield {"family": family.removeprefix("gemm_"), **options, **flag}
    if family == "gemm_many" and "split" not in options and not swiglu:
        yield {"family": "many", **options, **flag, "whole_store": True}


def items() -> list[dict[str, Any]]:
    """One matmul's items together: its weights are made once."""
    found = []
    linears = [name for name in LINEARS if not name.endswith("head")]
    for linear in linears:
        few = () if LINEARS[linear][2] else (16, 64)
        for rows in (*few, 128, 256, 512, 1024, 2048, 4096, 8192):
            found.append({"linear": linear, "rows": rows, "extra": "", "options": list(candidates(linear, rows))})
            if rows in (128, 512, 1024, 2048, 4096) and linear.split(".")[1] != "qkv":
                found.append({"linear": linear, "rows": rows, "extra": "epilogue",
                              "options": list(epilogue_candidates(linear, rows))})
    return with_variants(found)


def with_variants(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for item in found:
        n, k, _ = LINEARS[item["linear"]]
        made = [variant(one["family"], (n, k), linear=item["linear"], dependent_launch=True,
                        **{key: value for key, value in one.items() if key != "family" and DEFAULTS.get(key) != value})
                for one in item.pop("options")]
        item["variants"] = list({one["name"]: one for one in made}.values())
    return found


# ---- building machine ----

def build(folder: Path, todo: list[dict[str, Any]], per_module: int = 16) -> None:
    makers = {one["name"]: partial(make, one) for item in todo for one in item["variants"]}
    made = compile_parts(folder, "turns", makers, per_module)
    place = {name: kernel["library"] for name, kernel in made.items()}
    (folder / "turns.json").write_text(json.dumps({"items": todo, "place": place}))
    print(f"{len(made)} kernels for {len(todo)} items; with a stack frame: {spilling(made)}")


# ---- GPU machine ----

CLUSTER_PROBE = """
#include <cstdio>
__global__ void probe(int* out) { extern __shared__ int s[]; out[0] = s[0]; }
int main() {
  cudaFuncSetAttribute(probe, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10);
  for (int size = 1; size <= 8; ++size) {
    cudaLaunchConfig_t config = {}; cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension; cluster.val.clusterDim = {(unsigned)size, 1, 1};
    config.gridDim = dim3(size * 64); config.blockDim = dim3(384); config.dynamicSmemBytes = 200 << 10;
    config.attrs = &cluster; config.numAttrs = 1;
    int n = -1; cudaError_t e = cudaOccupancyMaxActiveClusters(&n, probe, &config);
    printf("%d %d %d\\n", size, n, (int)e);
  }
}
"""


def cluster_counts() -> dict[str, int]:
    """Clusters of 1 to 8 blocks (one block per multiprocessor) that run at the same time; empty where nvcc is missing."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text(CLUSTER_PROBE)
        made = subprocess.run(["nvcc", "-arch=sm_90", source, "-o", source.with_suffix("")], capture_output=True, text=True)
        if made.returncode:
            return {}
        lines = subprocess.run([source.with_suffix("")], capture_output=True, text=True).stdout.split("\n")
    return {line.split()[0]: int(line.split()[1]) for line in lines if line}


class Turns:
    def __init__(self, folder: Path, place: dict[str, str]) -> None:
        self.bench, self.place = Bench(folder), place
        self.torch = self.bench.torch
        self.weights: dict[str, Any] = {}
        self.checked: dict[str, float] = {}
        self.references: dict[Any, Any] = {}

    def kernel(self, one: dict[str, Any]) -> Any:
        return self.bench.kernel({**one, "library": self.place[one["name"]]})

    def copies(self, linear: str) -> list[Any]:
        if linear not in self.weights:
            self.weights.clear()
            self.references.clear()
            self.torch.cuda.empty_cache()
            n, k, _ = LINEARS[linear]
            first = self.bench.random((n, k), "bfloat16", k ** -0.5)
            count = max(4, copies_to_rotate(2 * n * k))
            self.weights[linear] = [first, *(first.clone() for _ in range(count - 1))]
        return self.weights[linear]

    def extras(self, one: dict[str, Any], rows: int) -> list[Any]:
        n, options = one["n"], one["options"]
        width = n // 2 if options.get("swiglu") else n
        return [*([self.bench.random((n,), "float32")] if options.get("bias") else []),
                *([self.bench.random((rows, width), "bfloat16")] if options.get("residual") else [])]

    def finish(self, one: dict[str, Any], z: Any, extra: list[Any]) -> Any:
        """The epilogue in float64 on packed columns (8 gate columns, then their 8 up columns)."""
        options, extra = one["options"], list(extra)
        if options.get("bias"):
            z = z + extra.pop(0).double()
        if options.get("swiglu"):
            gate, up = z.reshape(z.shape[0], -1, 2, 8).unbind(2)
            z = (gate * self.torch.sigmoid(gate) * up).reshape(z.shape[0], -1)
        return z + extra.pop(0).double() if options.get("residual") else z

    def error(self, got: Any, reference: Any) -> float:
        return float((got.double() - reference).norm() / reference.norm())

    def check(self, one: dict[str, Any], weight: Any) -> float:
        """Relative error against float64 at an odd number of rows; infinite where two runs differ."""
        key = "product"
        if key not in self.references:
            x = self.bench.random((CHECK_ROWS, one["k"]), "bfloat16")
            self.references[key] = (x, x.double() @ weight.double().T)
        x, product = self.references[key]
        extra = self.extras(one, CHECK_ROWS)
        reference = self.finish(one, product, extra)
        outs = [self.torch.full(reference.shape, float("nan"), device="cuda", dtype=x.dtype) for _ in range(2)]
        for out in outs:
            self.kernel(one)(x, weight, *extra, out)
        return self.error(outs[0], reference) if self.torch.equal(*outs) else float("inf")

    def library(self, item: dict[str, Any], x: Any, copies: list[Any]) -> dict[str, list[Callable[[], Any]]]:
        """What torch needs for the same result: the product and, for an epilogue, the better of its ways for the rest."""
        torch, linear = self.torch, item["linear"]
        bare = [partial(torch.nn.functional.linear, x, weight) for weight in copies]
        if not item["extra"]:
            return {"cublas": bare}
        y = torch.empty((x.shape[0], copies[0].shape[0]), device="cuda", dtype=x.dtype)
        if LINEARS[linear][2]:
            out = torch.empty((x.shape[0], copies[0].shape[0] // 2), device="cuda", dtype=x.dtype)
            gate = silu_and_multiply()
            return {"cublas+kernel": [partial(in_turn, partial(torch.mm, x, weight.T, out=y), partial(gate, y, out))
                                      for weight in copies]}
        residual = torch.randn_like(y)
        return {"cublas+add": [partial(in_turn, partial(torch.mm, x, weight.T, out=y), partial(y.add_, residual))
                               for weight in copies],
                "cublas addmm": [partial(torch.addmm, residual, x, weight.T, out=y) for weight in copies]}

    def measure(self, item: dict[str, Any], skip: set[str], at: Callable[[str], None]) -> dict[str, Any]:
        torch, rows, linear = self.torch, item["rows"], item["linear"]
        copies = self.copies(linear)
        used = copies if rows <= 512 else copies[:4] if rows <= 2048 else copies[:2]
        x = self.bench.random((rows, item["variants"][0]["k"]), "bfloat16")
        replays: dict[str, Callable[[], float]] = {}
        errors = {}
        product = torch.nn.functional.linear(x, copies[0])
        for one in item["variants"]:
            name = one["name"]
            if name in skip:
                continue
            at(name)
            if name not in self.checked:
                self.checked[name] = self.check(one, copies[0])
            extra = self.extras(one, rows)
            reference = self.finish(one, product.double(), extra) if rows * one["n"] < 1 << 27 else None
            out = torch.full((rows, one["n"] // (2 if one["options"].get("swiglu") else 1)), float("nan"), device="cuda",
                             dtype=x.dtype)
            fn = self.kernel(one)
            fn(x, copies[0], *extra, out)
            errors[name] = [self.checked[name], -1.0 if reference is None else self.error(out, reference)]
            if not (errors[name][0] < 4e-3 and errors[name][1] < 8e-3):         # a wrong kernel is not timed
                continue
            replays[name] = self.bench.captured([partial(fn, x, weight, *extra, out) for weight in used])
        at("cublas")
        for name, calls in self.library(item, x, used).items():
            replays[name] = self.bench.captured(calls)
        return {"linear": linear, "rows": rows, "extra": item["extra"], "errors": errors, "us": medians(replays, rows)}


def medians(replays: Mapping[str, Callable[[], float]], rows: int) -> dict[str, float]:
    """Median time of each replay. They run in turns, and every round begins with the next one: the first of a round is the
    fastest. Fewer rounds where one takes long."""
    names = list(replays)
    times: dict[str, list[float]] = {name: [] for name in names}
    rounds = -(-(6 if rows >= 4096 else 9) // len(names)) * len(names)
    for replay in replays.values():
        replay()
    for turn in range(rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            times[name].append(replays[name]())
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def in_turn(*calls: Callable[[], Any]) -> None:
    for call in calls:
        call()


def silu_and_multiply() -> Callable[[Any, Any], None]:
    """One Triton kernel, as the peers have it: out = silu(gate) * up for y = [gate | up]."""
    import triton
    import triton.language as tl

    globals()["tl"] = tl        # the kernel's names are looked up in this module

    out_kernel = triton.jit(_silu_and_multiply)

    def call(y: Any, out: Any) -> None:
        rows, width = out.shape
        out_kernel[(rows, triton.cdiv(width, 2048))](y, out, width, block=2048, num_warps=8)

    return call


def _silu_and_multiply(y, out, width, block: tl.constexpr):  # type: ignore[no-untyped-def, name-defined]  # noqa: F821
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)     # noqa: F821
    inside = column < width
    gate = tl.load(y + row * 2 * width + column, mask=inside).to(tl.float32)                         # noqa: F821
    up = tl.load(y + row * 2 * width + width + column, mask=inside).to(tl.float32)                   # noqa: F821
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)   # noqa: F821


def child(folder: Path, out: Path, deadline: float, of_items: Callable[[Path, dict[str, str]], Any] = Turns) -> int:
    """Items one after the other by an object with `bench` and `measure`, as `Turns` is."""
    index = json.loads((folder / "turns.json").read_text())
    result = json.loads(out.read_text())
    progress = {"at": "", "time": time.time()}

    def at(name: str) -> None:
        progress.update(at=name, time=time.time())

    def watch() -> None:
        while time.time() - progress["time"] < STUCK:
            time.sleep(1)
        result["broken"].append(progress["at"])
        out.write_text(json.dumps(result))
        os._exit(3)

    at("start")
    threading.Thread(target=watch, daemon=True).start()
    turns = of_items(folder, index["place"])
    result.setdefault("ceilings", turns.bench.ceilings())
    result["device"] = turns.bench.torch.cuda.get_device_name()
    done = {(one["linear"], one["rows"], one["extra"]) for one in result["items"]}
    for item in index["items"]:
        if (item["linear"], item["rows"], item["extra"]) in done:
            continue
        if time.time() > deadline:
            break
        try:
            result["items"].append(turns.measure(item, set(result["broken"]), at))
        except Exception as error:   # one broken kernel must not hide the others; it is reported
            result["broken"].append(progress["at"])
            result["failures"].append({"at": progress["at"], "error": f"{type(error).__name__}: {error}"[:400]})
            out.write_text(json.dumps(result))
            if "CUDA" in str(error) or "cuda" in str(error):
                os._exit(3)
        out.write_text(json.dumps(result))
    result["complete"] = True
    out.write_text(json.dumps(result))
    os._exit(0)


def run(folder: Path, out: Path, limit: float, script: str = __file__) -> dict[str, Any]:
    """All items, by children of `script`: one that dies is followed by another without the kernel it was at."""
    deadline = time.time() + limit
    out.write_text(json.dumps({"clusters": cluster_counts(), "items": [], "broken": [], "failures": []}))
    for _ in range(6):
        if time.time() > deadline - 5:
            break
        code = subprocess.run([sys.executable, script, "child", str(folder), "--out", str(out), "--limit",
                               str(deadline - time.time())], timeout=limit + 60).returncode
        if code == 0:
            break
    return dict(json.loads(out.read_text()))


def report(result: dict[str, Any]) -> None:
    print("clusters", result["clusters"], "ceilings", result.get("ceilings"), "complete", result.get("complete"),
          "broken", result["broken"], "failures", result["failures"][:3])
    bad = {name: value for item in result["items"] for name, value in item["errors"].items() if name not in item["us"]}
    print(f"{len(result['items'])} items, wrong: {bad}")
    ratios: dict[Any, list[float]] = {}
    for item in sorted(result["items"], key=lambda one: (one["extra"], one["rows"])):
        theirs = min((us for name, us in item["us"].items() if name.startswith("cublas")), default=0.0)
        ours = sorted((us, name) for name, us in item["us"].items() if not name.startswith("cublas"))
        if ours and theirs:
            ratios.setdefault((item["extra"], item["rows"]), []).append(theirs / ours[0][0])
            print(f"{item['linear']:11s} {item['rows']:5d} {item['extra']:8s} {theirs / ours[0][0]:.3f} cublas {theirs:.1f} "
                  + "; ".join(f"{us:.1f} {name.split('_bf_bf_')[1].replace('de1', '')}" for us, name in ours[:3]))
    for key, values in ratios.items():
        print(key, f"best of ours: {geometric_mean(values):.3f}x over {len(values)}, least {min(values):.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["build", "run", "child", "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("matmul-turns.json"))
    parser.add_argument("--limit", type=float, default=90, help="seconds")
    options = parser.parse_args()
    if options.command == "build":
        build(options.folder, items())
        return 0
    if options.command == "report":
        report(json.loads(options.out.read_text()))
        return 0
    if options.command == "child":
        return child(options.folder, options.out, time.time() + options.limit)
    report(run(options.folder, options.out, options.limit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
