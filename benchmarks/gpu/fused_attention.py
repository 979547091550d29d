"""RoPE + append + decode attention in one launch against the kernels one by one, between the two matmuls that surround them
in a step: 32 layers in one CUDA graph, so that what overlaps in a step overlaps here.

    python -m benchmarks.gpu.fused_attention build FOLDER              # anywhere with nvcc, no GPU needed
    python -m benchmarks.gpu.fused_attention run FOLDER --out FILE     # on the GPU: TVM runtime and torch

Numbers first: every variant against float64 on ragged lengths, its pages against rope_append's, 100 equal repeats. Then
microseconds a layer of QKV + attention + O, and what is left of them without the same chain's QKV + O.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LAYERS = 32
HIDDEN = {"8b": 4096, "1b": 2048, "7b": 3584}
CASES = ((128, 512), (32, "ragged"), (1, 512), (8, "ragged"), (64, 512), (2, 512), (4, 512), (1, 32768), (16, 8192),
         (8, 512), (32, 2048), (1, 8192), (8, 2048), (16, 512), (32, 512), (1, 2048))
# cluster, warps, stages, key tiles, blocks that may share a multiprocessor (0: as many as fit), by largest batch
VARIANTS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((8, 4, 4, 1, 1), (8, 4, 3, 1, 1), (16, 4, 3, 1, 1), (8, 8, 2, 2, 1)),
    2: ((4, 8, 2, 1, 1), (4, 4, 3, 1, 1), (4, 4, 4, 1, 1), (8, 4, 2, 1, 2)),
    4: ((4, 4, 2, 1, 2), (2, 8, 2, 1, 1), (2, 4, 4, 1, 1), (8, 4, 2, 1, 2)),
    8: ((2, 4, 3, 1, 1), (2, 4, 4, 1, 1), (4, 4, 2, 1, 2), (2, 8, 2, 1, 1)),
    32: ((2, 4, 3, 1, 0), (1, 4, 3, 1, 0), (4, 4, 2, 1, 0)),
    128: ((2, 4, 3, 1, 0), (1, 4, 3, 1, 0), (1, 4, 2, 1, 0), (1, 4, 4, 1, 0)),
}
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
RAGGED = {4: [12000, 500, 90, 2000], 8: [16000, 40, 300, 1200, 90, 2000, 512, 700],
          32: [8000, *(60 + 61 * i % 1900 for i in range(31))]}


def variants(rows: int) -> tuple[tuple[int, ...], ...]:
    return next(some for most, some in VARIANTS.items() if rows <= most)


def label(cluster: int, warps: int, stages: int, key_tiles: int = 1, blocks: int = 0) -> str:
    return f"c{cluster}w{warps}s{stages}" + (f"k{key_tiles}" if key_tiles > 1 else "") + (f"b{blocks}" if blocks else "")


# where code is built

def build(folder: Path) -> None:
    from relaxpack.kernel_spec import LinearSpec
    from relaxpack.schedules.kernels.cuda.attention_decode import decode_attention
    from relaxpack.schedules.kernels.cuda.linear import linear
    from relaxpack.schedules.kernels.cuda.rope_append import rope_append
    from relaxpack.schedules.kernels.cuda.rope_append_attention import rope_append_attention
    from relaxpack.schedules.kernels.cuda.rope_append_attention_tuning import FusedTuning, reserve
    from relaxpack.weight_format import FORMATS
    from tests.helpers import attention_builds as builds
    from tests.helpers import cuda_harness

    models = {"8b": builds.LLAMA_8B, "1b": builds.LLAMA_1B, "7b": builds.QWEN_7B}
    kernels: dict[str, tuple[Any, Any]] = {}
    for model, spec in models.items():
        kernels[f"rope.{model}"] = spec, rope_append(spec)
        kernels[f"decode.{model}"] = spec, decode_attention(spec)
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        for rows in BUCKETS:
            for name, n, k in (("qkv", width, HIDDEN[model]), ("o", HIDDEN[model], spec.num_heads * spec.head_dim)):
                kernels[f"{name}.{model}.{rows}"] = spec, linear(
                    LinearSpec(n, k, FORMATS["bf16"], "decode", "bfloat16", "bfloat16", max_rows=rows), "sm_90a")
        for variant in sorted({v for some in VARIANTS.values() for v in some}):
            tuning = FusedTuning(*variant[:4], reserve("sm_90a", variant[4]) if variant[4] else 0)
            if tuning.shared_bytes(spec) <= 227 * 1024 and (spec.head_dim == 64 or variant[3] == 1):
                kernels[f"fused.{model}.{label(*variant)}"] = spec, rope_append_attention(spec, 1, tuning=tuning)
    for name, spec in small(builds.spec).items():
        kernels[f"rope.{name}"] = spec, rope_append(spec)
        for cluster, warps, stages in ((8, 4, 2), (4, 2, 3), (1, 4, 2), (16, 1, 2)):
            tuning = FusedTuning(cluster, warps, stages)
            kernels[f"fused.{name}.{label(cluster, warps, stages)}"] = spec, rope_append_attention(spec, 1, tuning=tuning)
    funcs: dict[str, Any] = {}
    manifest: dict[str, Any] = {"kernels": {}}
    for name, (spec, kernel) in kernels.items():
        stages_of = []
        for i, stage in enumerate(kernel.stages):
            function = f"{name}.{i}".replace(".", "_")
            funcs[function] = stage.func
            stages_of.append({"function": function, "inputs": stage.inputs, "outputs": stage.outputs})
        manifest["kernels"][name] = {"spec": dataclasses.asdict(spec), "stages": stages_of,
                                     "temporaries": kernel.temporaries}
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    cuda_harness.lower(funcs, "sm_90a").export_library(str(folder / "kernels.so"))
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    print(f"{len(funcs)} functions in {time.perf_counter() - begin:.0f} s, "
          f"{(folder / 'kernels.so').stat().st_size / 1e6:.1f} MB")


def small(spec: Any) -> dict[str, Any]:
    """Shapes for the numbers only: head_dim, groups, page sizes, window, norm, both dtypes."""
    return {"d64_norm": spec(8, 2, 64, norm=1e-6), "d96_w": spec(6, 2, 96, window=100),
            "d128_p64_f16": spec(8, 1, 128, 64, 160, "float16"), "d256": spec(4, 4, 256),
            "d128_g16_w": spec(16, 1, 128, 64, 160, window=700), "d64_g7": spec(7, 1, 64),
            "d128_r32_norm": spec(8, 2, 128, norm=1e-6, rotary_dim=32)}


# where the GPU is

class Bench:
    def __init__(self, folder: Path, out: Path, limit: float) -> None:
        import torch

        from tests.helpers import attention_device
        self.torch, self.dev = torch, attention_device
        self.library = attention_device.Library(folder)
        self.out, self.end = out, time.monotonic() + limit
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def record(self, **values: Any) -> None:
        self.rows.append(values)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) and v > 0.01 else f"{k} {v}" for k, v in values.items()),
              flush=True)
        self.out.write_text(json.dumps({"device": self.torch.cuda.get_device_name(), "rows": self.rows,
                                        "failures": self.failures}, indent=1) + "\n")

    def require(self, ok: bool, what: str) -> None:
        if not ok:
            self.failures.append(what)
            print("FAILED", what, flush=True)

    def check(self, name: str) -> None:
        """One fused kernel: numbers, pages, repeats."""
        error, complaints = self.dev.check_fused(self.library, name)
        for complaint in complaints:
            self.require(False, complaint)
        self.record(kind="numbers", kernel=name, error=error)

    def candidates(self, model: str, batch: int) -> dict[str, tuple[str, ...]]:
        """What is timed, by label: the kernels of each. The first is what the others' numbers are compared with."""
        found = {"one by one": (f"rope.{model}", f"decode.{model}")}
        for variant in variants(batch):
            if (name := f"fused.{model}.{label(*variant)}") in self.library:
                found[label(*variant)] = (name,)
        return found

    def time_case(self, model: str, batch: int, length: int | str) -> None:
        torch, dev, library = self.torch, self.dev, self.library
        spec = library.spec(f"rope.{model}")
        step = dev.DecodeStep(spec, [length] * batch if isinstance(length, int) else RAGGED[batch], LAYERS)
        weights = self.weights(model, spec)
        x = torch.randn((batch, HIDDEN[model]), device=dev.DEVICE).to(torch.bfloat16)
        results = torch.empty((batch, HIDDEN[model]), device=dev.DEVICE, dtype=torch.bfloat16)
        qkv = torch.empty_like(step.qkv)
        outputs = [torch.empty_like(step.y) for _ in range(LAYERS)]
        q = torch.empty_like(step.y)

        def surround(layer: int, between: Any) -> list[Any]:
            before = library.prepare(f"qkv.{model}.{batch}", {"x": x, "weight": weights[0][layer], "y": qkv, "q": x})
            after = library.prepare(f"o.{model}.{batch}", {"x": outputs[layer], "weight": weights[1][layer], "y": results,
                                                           "q": x})
            return [before, *between, after]

        def measure(between: Any, matmuls: bool = True) -> float:
            calls = [call for layer in range(LAYERS)
                     for call in (surround(layer, between(layer)) if matmuls else between(layer))]
            return dev.graph_time([lambda: [call() for call in calls]], 15) / LAYERS * 1e6

        def attend(names: tuple[str, ...]) -> Any:
            def calls(layer: int) -> list[Any]:
                held = {**step.buffers(layer), "qkv": qkv, "q": q, "y": outputs[layer]}
                return [library.prepare(name, held) for name in names]
            return calls

        for output in outputs:
            output.zero_()
        bare = measure(lambda layer: [])
        common = {"kind": "time", "model": model, "batch": batch, "length": length}
        expected: list[Any] = []
        for kernel, names in self.candidates(model, batch).items():
            for output in outputs:
                output.fill_(float("nan"))
            layer_us = measure(attend(names))
            expected = expected or [output.clone() for output in outputs]
            error = max(dev.relative_error(a, b.double()) for a, b in zip(outputs, expected, strict=True))
            self.require(error < 6e-3, f"{kernel} {batch}x{length}: differs from the first by {error:.2e}")
            self.record(**common, kernel=kernel, layer_us=layer_us, over_matmuls_us=layer_us - bare,
                        alone_us=measure(attend(names), False), matmuls_us=bare, difference=error)

    def weights(self, model: str, spec: dict[str, Any]) -> Any:
        torch = self.torch
        width = (spec["num_heads"] + 2 * spec["num_kv_heads"]) * spec["head_dim"]
        shapes = (width, HIDDEN[model]), (HIDDEN[model], spec["num_heads"] * spec["head_dim"])
        if getattr(self, "held", (None,))[0] != model:
            self.held = model, [(torch.randn((LAYERS, *shape), device=self.dev.DEVICE, dtype=torch.bfloat16)
                                 * shape[1] ** -0.5) for shape in shapes]
        return self.held[1]

    def run(self, models: list[str]) -> None:
        for name in self.library.names("fused."):
            if name.split(".")[1] not in HIDDEN:
                self.check(name)
        for batch, length in CASES:
            for model in models:
                if time.monotonic() > self.end:
                    return
                first = (batch, length) == CASES[0] and model == models[-1]
                for name in self.library.names(f"fused.{model}.") if first else ():
                    self.check(name)
                self.time_case(model, batch, length)
                self.torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "run"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        if name == "run":
            command.add_argument("--out", type=Path, required=True, help="JSON file, written after every row")
            command.add_argument("--limit", type=float, default=100, help="seconds after which nothing new is begun")
            command.add_argument("--models", default="8b,1b,7b")
    args = parser.parse_args()
    if args.command == "build":
        build(args.folder)
        return 0
    bench = Bench(args.folder, args.out, args.limit)
    bench.run(args.models.split(","))
    print("FAILURES:" if bench.failures else "all checks passed", *bench.failures, sep="\n")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
