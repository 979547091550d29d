"""The LM head with stage one of sampling in its epilogue against two kernels: right numbers first, then times.

    python benchmarks/gpu/head_sample.py build FOLDER                       # anywhere with nvcc
    python benchmarks/gpu/head_sample.py run FOLDER --out FILE --limit 90   # on the GPU: TVM runtime and torch

A case is a chain of one step's end, norm, head, sampling, as one graph; the difference of two chains is what fusion saves.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.matmul_bench import Bench

SHAPES = {"1b": (128256, 2048), "qwen-0.5b": (151936, 896), "smollm2": (49152, 576)}
ROWS = (1, 2, 4, 8)
TILINGS: dict[str, dict[str, int]] = {"as two": {"strips": 1, "unroll": 2}, "two strips": {"unroll": 2},
                                      "two strips, one chunk": {}}
OUTPUTS = ("y", "sums", "picks", "tops", "drawn")
STEPS = 16          # steps in a graph
COPIES = 3          # of a head, taken in turn: more than the L2 holds


# --- building machine -------------------------------------------------------------------------------------------------

def build(folder: Path) -> None:
    from relaxpack.kernel_spec import LinearSpec, NormSpec, SamplingSpec
    from relaxpack.schedules.cuda_compile import check_library, compile_module, resource_usage
    from relaxpack.schedules.kernels.cuda.head_sample import head_sample
    from relaxpack.schedules.kernels.cuda.provider import CudaKernels
    from relaxpack.target import parse_target
    from relaxpack.weight_format import FORMATS

    import tvm  # isort: skip

    folder.mkdir(parents=True, exist_ok=True)
    index: list[dict[str, Any]] = []
    for shape, (vocab, k) in SHAPES.items():
        provider, funcs = CudaKernels(parse_target("cuda:sm_90a")), {}
        spec = LinearSpec(vocab, k, FORMATS["bf16"], "decode", "bfloat16", "float32", max_rows=1)
        kernels = {"apart": [provider.norm(NormSpec(k, 1e-5, "bfloat16", False)), provider.linear(spec),
                             provider.sample(SamplingSpec(vocab))]}
        for name, tiling in TILINGS.items():
            if (fused := head_sample(spec, SamplingSpec(vocab), "sm_90a", **tiling)) is not None:
                kernels[name] = [kernels["apart"][0], fused]
        for name, chain in kernels.items():
            stages = [stage for kernel in chain for stage in kernel.stages]
            funcs |= {stage.name: stage.func.with_attr("global_symbol", stage.name) for stage in stages}
            index.append({"shape": shape, "n": vocab, "k": k, "way": name, "library": f"{shape}.so", "stages": [
                {"name": stage.name, "inputs": stage.inputs, "outputs": stage.outputs} for stage in stages]})
        executable = compile_module(tvm.IRModule(funcs), parse_target("cuda:sm_90a"))
        executable.export_library(str(folder / f"{shape}.so"))
        check_library(folder / f"{shape}.so")
        usage = resource_usage(folder / f"{shape}.so")
        for name in funcs:
            print(shape, name, usage.get(f"{name}_kernel"))
    (folder / "index.json").write_text(json.dumps(index))


# --- GPU machine ------------------------------------------------------------------------------------------------------

class HeadBench:
    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        self.torch = self.bench.torch
        self.copies: dict[str, list[Any]] = {}

    def weights(self, case: dict[str, Any]) -> list[Any]:
        if case["shape"] not in self.copies:
            self.copies.clear()
            self.torch.cuda.empty_cache()
            self.copies[case["shape"]] = [self.bench.random((case["n"], case["k"]), "bfloat16", 3 * case["k"] ** -0.5)
                                          for _ in range(COPIES)]
        return self.copies[case["shape"]]

    def buffers(self, case: dict[str, Any], rows: int, temperature: float) -> dict[str, Any]:
        torch, vocab, k = self.torch, case["n"], case["k"]
        parts = -(-vocab // 4096)
        torch.manual_seed(rows)
        i32, f32 = {"device": "cuda", "dtype": torch.int32}, {"device": "cuda", "dtype": torch.float32}
        settings = torch.tensor([[temperature, 1, 0, 1, 0, 0, 1, 0]] * rows, **f32)
        counters = torch.tensor([[0, 11 + i, 5, 100 + i, -1, -1, 0, 0] for i in range(rows)], **i32)
        before = torch.randn((rows, k), device="cuda").bfloat16()
        return {"before": before, "x": torch.empty_like(before), "norm": torch.ones(k, **f32), "settings": settings,
                "counters": counters, "counts": torch.zeros((1, self.counts_width(vocab)), **i32),
                "arrived": torch.zeros(parts, **i32), "y": torch.full((rows, vocab), float("nan"), **f32),
                "sums": torch.full((rows, parts, 5), float("nan"), **f32),
                "picks": torch.full((rows, parts, 3), -7, **i32), "tops": torch.zeros((rows, parts * 16), **f32),
                "drawn": torch.full((rows, 2), -7, **i32)}

    @staticmethod
    def counts_width(vocab: int) -> int:
        import relaxpack.kernel_spec as spec

        return int(spec.counts_width(vocab)) if hasattr(spec, "counts_width") else vocab

    def calls(self, case: dict[str, Any], buffers: dict[str, Any], weight: Any) -> list[Any]:
        def call(stage: dict[str, Any]) -> Any:
            renamed = {"logits": "y", **({"x": "before", "weight": "norm", "y": "x"} if "rms_norm" in stage["name"] else {})}
            names = [renamed.get(n, n) for n in (*stage["inputs"], *stage["outputs"])]
            fn = self.bench.kernel({"library": case["library"], "name": stage["name"]})
            tensors = [weight if n == "weight" else buffers[n] for n in names]
            return lambda: fn(*tensors)

        return [call(stage) for stage in case["stages"]]

    def check(self, case: dict[str, Any], apart: dict[str, Any], rows: int) -> dict[str, Any]:
        """Logits against float64; everything sampling finds has the bits of two kernels; the count is back at zero."""
        torch, found = self.torch, {"rows": rows, "ok": True}
        weight = self.weights(case)[0]
        for temperature in (0.0, 0.8):
            both = []
            for one in (apart, case):
                buffers = self.buffers(case, rows, temperature)
                for again in range(3):
                    for call in self.calls(one, buffers, weight):
                        call()
                    torch.cuda.synchronize()
                    if again == 0:
                        first = {name: buffers[name].clone() for name in OUTPUTS}
                found["ok"] &= all(torch.equal(first[name].view(torch.int32), buffers[name].view(torch.int32))
                                   for name in OUTPUTS) and not buffers["arrived"].any().item()
                both.append(buffers)
            exact = both[0]["x"].double() @ weight.double().T
            found["error"] = float((both[1]["y"].double() - exact).norm() / exact.norm())
            same = {name: torch.equal(both[0][name].view(torch.int32), both[1][name].view(torch.int32)) for name in OUTPUTS}
            found[f"same at {temperature:g}"] = {name: bool(value) for name, value in same.items()}
            found["ok"] &= found["error"] < 1e-5 and same["drawn"]
        found["ok"] = bool(found["ok"])
        return found

    def time(self, case: dict[str, Any], rows: int, temperature: float) -> Any:
        weights, buffers = self.weights(case), self.buffers(case, rows, temperature)
        calls = [call for i in range(STEPS) for call in self.calls(case, buffers, weights[i % COPIES])]
        replay = self.bench.captured(calls)
        return lambda: replay() * len(calls) / STEPS


def run(folder: Path, out: Path, limit: float) -> None:
    started, bench = time.monotonic(), HeadBench(folder)
    index = json.loads((folder / "index.json").read_text())
    result: dict[str, Any] = {"device": bench.torch.cuda.get_device_name(), "checks": [], "times": []}

    def save() -> None:
        result["seconds"] = round(time.monotonic() - started, 1)
        out.write_text(json.dumps(result, indent=1))

    for shape in SHAPES:
        mine = [case for case in index if case["shape"] == shape]
        good = [mine[0]]
        for case in mine[1:]:
            checks = [{"shape": shape, "way": case["way"], **bench.check(case, mine[0], rows)} for rows in (1, 3, 8)]
            result["checks"] += checks
            if all(check["ok"] for check in checks):
                good.append(case)
            save()
        for rows in ROWS:
            for temperature in (0.0, 0.8):
                if time.monotonic() - started > limit:
                    result["cut short"] = True
                    return save()
                replays = {case["way"]: bench.time(case, rows, temperature) for case in good}
                times: dict[str, list[float]] = {way: [] for way in replays}
                for _ in range(12):                         # in turns, so that clocks and heat are shared
                    for way, replay in replays.items():
                        times[way].append(replay())
                result["times"].append({"shape": shape, "rows": rows, "temperature": temperature, "us": {
                    way: {"best": round(min(own), 3), "median": round(sorted(own[1:])[len(own) // 2], 3)}
                    for way, own in times.items()}})
                save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build").add_argument("folder", type=Path)
    second = commands.add_parser("run")
    second.add_argument("folder", type=Path)
    second.add_argument("--out", type=Path, required=True)
    second.add_argument("--limit", type=float, default=90.0, help="seconds after which no further case is begun")
    args = parser.parse_args()
    if args.command == "build":
        build(args.folder)
    else:
        run(args.folder, args.out, args.limit)


if __name__ == "__main__":
    main()
