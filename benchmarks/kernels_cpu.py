"""Times every CPU kernel on the shapes of SmolLM2-135M next to two floors: bytes / measured read bandwidth and
operations / measured peak. Weights of few rows rotate through more memory than the last cache holds.
On a machine with other load set RELAXPACK_NUM_THREADS=1: then CPU time is measured, not wall time.

    python benchmarks/kernels_cpu.py [--rows 1 128 512] [--weights q4_1 q8_0 f16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable

import numpy as np

import relaxpack.tvm_setup  # noqa: F401  isort: skip
import tvm
from relaxpack.env import num_threads
from relaxpack.kernel_spec import AttentionSpec, EmbeddingSpec, Kernel, LinearSpec, NormSpec
from relaxpack.schedules.kernels.cpu import builder as b
from relaxpack.schedules.kernels.cpu.provider import CpuKernels
from relaxpack.target import parse_target
from relaxpack.weight_format import FORMATS, QuantizedTensor

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 30, 576, 1536, 9, 3, 64, 49152
ROTATE = 128 << 20  # bytes
to = tvm.runtime.tensor
rng = np.random.default_rng(0)


def compiled(kernels: CpuKernels, func: object) -> Callable[..., None]:
    target = kernels.target.to_tvm()
    with target:
        return tvm.compile(tvm.IRModule({"f": func.with_attr("global_symbol", "f")}), target)["f"]


def best(call: Callable[[], object], seconds: float = 0.4) -> float:
    """Smallest time of one call: other load only ever adds. With one thread its CPU time counts, which a busy machine
    disturbs less."""
    clock = time.thread_time if num_threads() == 1 else time.perf_counter
    call()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def read_bandwidth(kernels: CpuKernels, size: int = 1 << 28) -> float:
    """GB/s of a read of 256 MB by all threads."""
    threads, lanes = kernels.target.threads, kernels.isa.lanes
    part = size // 4 // threads

    def body(a: object, y: object) -> None:
        with b.parallel(threads) as t:
            acc = b.Registers(4, lanes, "int32", b.splat(b.T.int32(0), lanes))
            with b.loop(part // (4 * lanes)) as k:
                for i in range(4):
                    at = t * b.i64(part) + k * b.i64(4 * lanes) + b.i64(i * lanes)
                    acc[i] = acc[i] + b.load(a, at, lanes=lanes)
            b.store(y, acc[0] + acc[1] + acc[2] + acc[3], t, b.i64(0), lanes=lanes)

    f = compiled(kernels, b.build([("a", (size // 4,), "int32"), ("y", (threads, 64), "int32")], body))
    a, y = to(np.ones(size // 4, "int32")), to(np.zeros((threads, 64), "int32"))
    return size / best(lambda: f(a, y), 2.0) / 1e9


def peak(kernels: CpuKernels, integer: bool, steps: int = 200_000) -> float:
    """10^9 operations (multiply and add count two) a second of all threads: float32 FMA, or u8 x s8 dot products."""
    lanes, threads, chains = kernels.isa.lanes, kernels.target.threads, 12
    dtype = "int32" if integer else "float32"

    def body(x: object, y: object) -> None:
        with b.parallel(threads) as t:
            a = b.T.bind(b.load(x, b.i64(0), lanes=lanes))
            acc = b.Registers(chains, lanes, dtype, a)
            with b.loop(steps):
                for i in range(chains):
                    if integer:
                        u, s = (b.T.reinterpret(f"{kind}8x{lanes * 4}", a) for kind in ("uint", "int"))
                        acc[i] = kernels.isa.dot([u], [s], acc[i], 127)
                    else:
                        acc[i] = b.T.fma(acc[i], a, a)
            total = acc[0]
            for i in range(1, chains):
                total = total + acc[i]
            b.store(y, total, t, b.i64(0), lanes=lanes)

    f = compiled(kernels, b.build([("x", (lanes,), dtype), ("y", (threads, 64), dtype)], body))
    x, y = to(np.zeros(lanes, dtype)), to(np.zeros((threads, 64), dtype))
    return threads * steps * chains * lanes * (8 if integer else 2) / best(lambda: f(x, y)) / 1e9


def launch_cost(kernels: CpuKernels) -> tuple[float, float]:
    """Seconds of an empty serial call and of an empty parallel one."""
    def make(loop: Callable[[int], object]) -> float:
        def body(y: object) -> None:
            with loop(kernels.target.threads) as t:
                b.store(y, b.T.float32(1), t * b.i64(64))

        f = compiled(kernels, b.build([("y", (64 * kernels.target.threads,), "float32")], body))
        y = to(np.zeros(64 * kernels.target.threads, "float32"))

        def many() -> None:
            for _ in range(1000):
                f(y)
        return best(many) / 1000

    return make(b.loop), make(b.parallel)


def random_packed(kernels: CpuKernels, name: str, n: int, k: int, gated: bool) -> np.ndarray:
    fmt = FORMATS[name]
    if fmt.quantized:
        shape = (n, fmt.groups(k))
        codes = rng.integers(0, 125 if fmt.e4m3 else 15, (n, k)).astype("int8" if fmt.signed else "uint8")
        scales = rng.uniform(0.001, 0.01, shape).astype(fmt.scale_dtype)
        weight: object = QuantizedTensor(fmt, codes, scales, scales if fmt.minimum == "stored" else None)
    else:
        weight = rng.standard_normal((n, k), dtype="float32")
    return kernels.pack(kernels.weight_layout(fmt, n, k, gated), weight)[""]


def linear_time(kernels: CpuKernels, name: str, n: int, k: int, rows: int, glu: str | None,
                residual: bool) -> tuple[float, int]:
    spec = LinearSpec(n, k, FORMATS[name], "decode" if rows <= 16 else "prefill", "float32", "float32",
                      residual=residual, glu=glu)
    f = compiled(kernels, kernels.linear(spec).stages[0].func)
    packed = random_packed(kernels, name, n, k, glu is not None)
    columns = n // 2 if glu else n
    x, y = to(rng.standard_normal((rows, k), dtype="float32")), to(np.zeros((rows, columns), "float32"))
    extra = [to(np.zeros((rows, columns), "float32"))] if residual else []
    copies = [to(packed) for _ in range(max(1, ROTATE // packed.nbytes) if rows <= 16 else 2)]

    def all_copies() -> None:
        for weight in copies:
            f(x, weight, *extra, y)
    return best(all_copies) / len(copies), packed.nbytes


def attention_time(kernels: CpuKernels, what: str, rows: int, context: int, kv_dtype: str) -> float:
    page = 16
    pages = -(-context // page)
    spec = AttentionSpec(LAYERS, HEADS, KV_HEADS, DIM, DIM, page, pages, 8192, "float32", kv_dtype, DIM**-0.5)
    kernel: Kernel = getattr(kernels, what)(spec)
    f = compiled(kernels, kernel.stages[0].func)
    store = to(rng.standard_normal((LAYERS, pages + 1, 2, KV_HEADS, page, DIM), dtype="float32").astype(kv_dtype))
    table = to(np.arange(1, pages + 1, dtype="int32")[None])
    q, y = (to(rng.standard_normal((rows, HEADS * DIM), dtype="float32")) for _ in range(2))
    lengths, starts = to(np.array([context], "int32")), to(np.array([0, rows], "int32"))
    qkv = to(rng.standard_normal((rows, (HEADS + 2 * KV_HEADS) * DIM), dtype="float32"))
    rope, at = to(rng.standard_normal((8192, DIM), dtype="float32")), to(np.arange(context - rows, context, dtype="int32"))

    def layers() -> None:
        for layer in range(LAYERS):
            if what == "rope_append":
                f(qkv, rope, at, at, store, layer, q)
            elif what == "decode_attention":
                f(q, store, table, lengths, layer, y)
            else:
                f(q, store, table, starts, lengths, layer, y)
    return best(layers) / LAYERS


def norm_time(kernels: CpuKernels, rows: int) -> float:
    f = compiled(kernels, kernels.norm(NormSpec(HIDDEN, 1e-5, "float32", True)).stages[0].func)
    x, r, total, y = (to(rng.standard_normal((rows, HIDDEN), dtype="float32")) for _ in range(4))
    w = to(np.ones(HIDDEN, "float32"))

    def many() -> None:
        for _ in range(60):
            f(x, r, w, total, y)
    return best(many) / 60


def embedding_time(kernels: CpuKernels, name: str, rows: int) -> float:
    f = compiled(kernels, kernels.embedding(EmbeddingSpec(VOCAB, HIDDEN, FORMATS[name], "float32")).stages[0].func)
    table = to(random_packed(kernels, name, VOCAB, HIDDEN, False))
    ids, y = to(rng.integers(0, VOCAB, rows).astype("int32")), to(np.zeros((rows, HIDDEN), "float32"))
    return best(lambda: f(ids, table, y))


def report(kernels: CpuKernels, weights: Iterable[str], rows_list: Iterable[int]) -> dict[str, object]:
    bandwidth = read_bandwidth(kernels)
    serial, parallel = launch_cost(kernels)
    # Without VNNI the compiler would move the products out of the measuring loop.
    floats, bytes_ = peak(kernels, False), peak(kernels, True) if kernels.isa.vnni else float("nan")
    print(f"{kernels.target.name}, {kernels.target.threads} threads: read {bandwidth:.1f} GB/s; a call {serial * 1e6:.2f} "
          f"us, a parallel one {parallel * 1e6:.2f} us; peaks {floats:.0f} GFLOP/s float32, {bytes_:.0f} GOP/s int8",
          flush=True)
    results: dict[str, object] = {"target": kernels.target.to_json(), "threads": kernels.target.threads,
                                  "read_gb_s": bandwidth, "call_us": serial * 1e6, "parallel_call_us": parallel * 1e6,
                                  "float32_gflop_s": floats, "int8_gop_s": bytes_}
    for name in weights:
        head = "q8_0" if name.startswith("q4") else name
        for rows in rows_list:
            total = 0.0
            for label, fmt, n, k, count, glu, residual in (
                    ("qkv", name, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, LAYERS, None, False),
                    ("o", name, HIDDEN, HIDDEN, LAYERS, None, True),
                    ("gate_up", name, 2 * FFN, HIDDEN, LAYERS, "swiglu", False),
                    ("down", name, HIDDEN, FFN, LAYERS, None, True),
                    ("head", head, VOCAB, HIDDEN, 1, None, False)):
                m = 1 if label == "head" and rows > 16 else rows
                seconds, size = linear_time(kernels, fmt, n, k, m, glu, residual)
                total += seconds * count
                floor = size / bandwidth / 1e9
                print(f"  {name} rows {m:4d} {label:8s} {fmt:5s} {n:6d}x{k:<5d} {seconds * 1e6:9.1f} us  read floor "
                      f"{floor * 1e6:7.1f} us ({floor / seconds:4.0%})  {2 * m * n * k / seconds / 1e9:7.0f} GOP/s",
                      flush=True)
                results[f"{name}/{rows}/{label}_us"] = seconds * 1e6
            print(f"  {name} rows {rows}: all matmuls {total * 1e3:.2f} ms -> {rows / total:.0f} tok/s", flush=True)
            results[f"{name}/{rows}/all_ms"] = total * 1e3
    for kv in ("float32", "float16"):
        for context in (64, 512, 2048):
            seconds = attention_time(kernels, "decode_attention", 1, context, kv)
            size = context * 2 * KV_HEADS * DIM * np.dtype(kv).itemsize
            print(f"  decode_attention {kv} context {context}: {seconds * 1e6:.1f} us "
                  f"(read floor {size / bandwidth / 1e3:.1f})")
            results[f"decode_attention/{kv}/{context}_us"] = seconds * 1e6
        for rows in (128, 512, 2048):
            seconds = attention_time(kernels, "prefill_attention", rows, rows, kv)
            flops = 2 * 2 * HEADS * DIM * rows * (rows + 1) / 2
            print(f"  prefill_attention {kv} {rows} tokens: {seconds * 1e6:.0f} us, {flops / seconds / 1e9:.0f} GFLOP/s",
                  flush=True)
            results[f"prefill_attention/{kv}/{rows}_us"] = seconds * 1e6
    for rows in (1, 512):
        for label, seconds in (("add_rms_norm", norm_time(kernels, rows)),
                               ("embedding", embedding_time(kernels, "q8_0", rows)),
                               ("rope_append", attention_time(kernels, "rope_append", rows, rows, "float16"))):
            print(f"  {label} {rows} rows: {seconds * 1e6:.1f} us", flush=True)
            results[f"{label}/{rows}_us"] = seconds * 1e6
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 128, 512])
    parser.add_argument("--weights", nargs="*", default=["q4_1", "f32"], choices=list(FORMATS))
    parser.add_argument("--json", help="write the numbers there")
    args = parser.parse_args()
    results = report(CpuKernels(parse_target(args.target)), args.weights, args.rows)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
