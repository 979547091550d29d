"""On a GPU machine: load what `build_models.py` made, give it weights from a seed, check its numbers against a plain
torch forward, and time decode and prefill.

    PYTHONPATH=.:SITE python benchmarks/gpu/run_models.py FOLDER --model llama-3.2-1b [--weights fp8-a8] --out RESULT.json

Random weights with a deviation of 0.02, so that activations stay in range: normal in bfloat16, or in a quantised format
(`quantised_weights.py`). Reference: what they stand for, float32 math. A build that rounds activations to fp8 is held
against a second reference that rounds them, too; it speaks for prefill, because up to 8 rows nothing is rounded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantised_weights import gate_first, make

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.model_info import ModelInfo
from relaxpack.recipe import Pack, RopeTable, from_json
from relaxpack.runtime import cuda_memory
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import SequenceStep, StepPlan
from relaxpack.runtime.vm import Library, device_for
from relaxpack.weight_format import FORMATS


def make_parameters(description: dict[str, Any]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """(tensors in parameter order, plain weights by parameter name without format suffix)."""
    generator = torch.Generator("cuda").manual_seed(0)
    tensors: list[Any] = []
    plain: dict[str, torch.Tensor] = {}
    buffers: dict[str, dict[str, torch.Tensor]] = {}        # of quantised weights, by that name
    for p in description["parameters"]:
        name, shape, recipe = p["name"], p["shape"], from_json(p["recipe"])
        if isinstance(recipe, RopeTable):
            tensors.append(tvm.runtime.from_dlpack(torch.from_numpy(recipe.numbers()).cuda()))
            continue
        base = name.split("@")[0]
        if isinstance(recipe, Pack) and FORMATS[recipe.format].quantized:
            if base not in buffers:
                buffers[base], plain[base] = make(FORMATS[recipe.format], recipe.out_features, recipe.in_features,
                                                  recipe.gated, generator)
            w = buffers[base][recipe.suffix]
            tensors.append(tvm.runtime.from_dlpack(w.view(torch.uint32) if w.dtype == torch.int32 else w))
            continue
        if p["dtype"] in ("bfloat16", "float16"):
            w = torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).mul_(0.02)
            w = w.to(getattr(torch, p["dtype"]))
        elif p["dtype"] == "float32":
            w = torch.randn(shape, generator=generator, device="cuda") * 0.1
            if "norm" in name:
                w += 1
            w = w.bfloat16().float()    # as in a checkpoint
        else:
            raise SystemExit(f"{name}: dtype {p['dtype']} is not handled here")
        plain[base] = gate_first(w) if isinstance(recipe, Pack) and recipe.gated and w.ndim == 2 else w
        tensors.append(tvm.runtime.from_dlpack(w))
    return tensors, plain


class Reference:
    """Plain torch forward of one sequence on the plain weights, in float32 or (to know the dtype's own error) bfloat16.
    `rounds`: what the layers' matmuls multiply is first rounded to fp8, row by row, as quantize_rows.py does."""

    def __init__(self, description: dict[str, Any], plain: dict[str, torch.Tensor],
                 dtype: torch.dtype = torch.float32, rounds: bool = False) -> None:
        self.d, self.w, self.dtype, self.rounds = description, plain, dtype, rounds
        self.info = ModelInfo.from_json(description["info"])

    def __call__(self, ids: list[int]) -> torch.Tensor:
        i, w = self.info, self.w
        n, d = len(ids), i.head_dim
        x = w["model.embed_tokens.weight"][torch.tensor(ids, device="cuda")].to(self.dtype)
        x = x * torch.tensor(self.d.get("embedding_scale", 1.0), dtype=torch.bfloat16, device="cuda").to(self.dtype)
        inv = self.d["rope_theta"] ** -(torch.arange(0, d, 2, device="cuda", dtype=torch.float64) / d)
        angle = (torch.arange(n, device="cuda").double()[:, None] * inv).float()
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def norm(v: torch.Tensor, name: str) -> torch.Tensor:
            v = v.float()
            return (v * torch.rsqrt((v * v).mean(-1, keepdim=True) + self.d["epsilon"]) * w[name]).to(self.dtype)

        def rope(v: torch.Tensor) -> torch.Tensor:
            a, b = v[..., :d // 2], v[..., d // 2:]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self.dtype)

        def product(v: torch.Tensor, name: str) -> torch.Tensor:
            if self.rounds:
                largest = v.bfloat16().float().abs().amax(-1, keepdim=True).clamp(min=2.0**-110)
                codes = (v.bfloat16().float() * (448 / largest)).to(torch.float8_e4m3fn)
                v = (codes.float() * (largest / 448)).to(self.dtype)
            return v @ w[name].to(self.dtype).T

        for layer in range(i.num_layers):
            p = f"model.layers.{layer}."
            qkv = product(norm(x, p + "input_layernorm.weight"), p + "self_attn.q_proj+k_proj+v_proj.weight")
            if self.d["qkv_bias"]:
                qkv = (qkv + w[p + "self_attn.q_proj+k_proj+v_proj.bias"]).to(self.dtype)
            q, k, v = (part.reshape(n, -1, d) for part in
                       qkv.split([i.num_heads * d, i.num_kv_heads * d, i.num_kv_heads * d], -1))
            if p + "self_attn.q_norm.weight" in w:
                q, k = norm(q, p + "self_attn.q_norm.weight"), norm(k, p + "self_attn.k_norm.weight")
            q, k = rope(q), rope(k)
            o = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], is_causal=True,
                enable_gqa=True)[0].transpose(0, 1).reshape(n, -1)
            x = x + product(o, p + "self_attn.o_proj.weight")
            gu = product(norm(x, p + "post_attention_layernorm.weight"), p + "mlp.gate_proj+up_proj.weight")
            gate, up = gu.chunk(2, -1)
            gate = (torch.nn.functional.silu(gate) if self.d.get("activation", "silu") == "silu"
                    else torch.nn.functional.gelu(gate, approximate="tanh"))
            x = x + product(gate * up, p + "mlp.down_proj.weight")
        head = w["model.embed_tokens.weight" if self.d["tie_embeddings"] else "lm_head.weight"].to(self.dtype)
        return (norm(x, "model.norm.weight") @ head.T).float()


def load(library: Path, description: dict[str, Any], tensors: list[Any], num_pages: int = 4096,
         graphs: bool = True) -> CudaModelRunner:
    device = device_for("cuda")
    info = ModelInfo.from_json(description["info"])
    return CudaModelRunner(Library(library, device, tensors, graphs=graphs), info, device, description["buckets"],
                           num_pages=num_pages, spread=description.get("spread", {}))


def relative_error(got: np.ndarray, want: torch.Tensor) -> float:
    g = torch.from_numpy(np.array(got)).cuda().float()
    return float((g - want).norm() / want.norm()) if bool(torch.isfinite(g).all()) else float("nan")


class Pages:
    def __init__(self, runner: CudaModelRunner) -> None:
        self.free = list(range(1, runner.num_pages))
        self.size = runner.page_size

    def take(self, tokens: int) -> list[int]:
        count = -(-tokens // self.size)
        taken, self.free = self.free[:count], self.free[count:]
        return taken


def check(runner: CudaModelRunner, reference: Reference) -> dict[str, float]:
    """Relative errors of prefill (whole, chunked, ragged) and decode (several buckets) logits."""
    rng = np.random.default_rng(0)
    errors: dict[str, float] = {}
    pages = Pages(runner)
    prompts = [rng.integers(0, runner.vocab_size, n).tolist() for n in (203, 1, 16, 77, 515)]
    tables = [pages.take(len(p) + 24) for p in prompts]
    steps = tuple(SequenceStep(p, 0, t, [len(p) - 1]) for p, t in zip(prompts, tables, strict=True))
    full = [reference(p) for p in prompts]
    rows = runner.forward(StepPlan(steps))
    errors["prefill_ragged"] = max(relative_error(rows[i], full[i][-1]) for i in range(len(prompts)))
    extra = [rng.integers(0, runner.vocab_size, 20).tolist() for _ in prompts]
    long = [reference(p + e) for p, e in zip(prompts, extra, strict=True)]
    first = pages.take(len(prompts[0]))
    runner.forward(StepPlan((SequenceStep(prompts[0][:100], 0, first, []),)))
    rows = runner.forward(StepPlan((SequenceStep(prompts[0][100:], 100, first, [102]),)))
    errors["prefill_chunked"] = relative_error(rows[0], full[0][-1])
    for k in range(20):
        batch = range(1 + k % len(prompts))
        # the others step too, so that all keep up: first the batch under test, then the rest
        for part in (list(batch), [i for i in range(len(prompts)) if i not in batch]):
            if not part:
                continue
            rows = runner.forward(StepPlan(tuple(
                SequenceStep([extra[i][k]], len(prompts[i]) + k, tables[i], [0]) for i in part)))
            worst = max(relative_error(rows[j], long[i][len(prompts[i]) + k]) for j, i in enumerate(part))
            name = f"decode_batch_{len(part)}"
            errors[name] = max(errors.get(name, 0.0), worst)
    return errors


def graph_equals_eager(graphs: CudaModelRunner, eager: CudaModelRunner) -> dict[str, bool]:
    """Bit for bit, per bucket: replays against the very same kernels launched one by one."""
    rng = np.random.default_rng(3)
    equal: dict[str, bool] = {}
    for size in (1, 2, 8, 32):
        plans = []
        for runner in (graphs, eager):
            pages = Pages(runner)
            plans.append([pages.take(80) for _ in range(size)])
        prompts = [rng.integers(0, graphs.vocab_size, 64).tolist() for _ in range(size)]
        outs = []
        for runner, tables in zip((graphs, eager), plans, strict=True):
            for p, t in zip(prompts, tables, strict=True):
                first = runner.forward(StepPlan((SequenceStep(p, 0, t, [63]),)))
            rows = [first, *(runner.forward(StepPlan(tuple(
                SequenceStep([k + i], 64 + k, t, [0]) for i, t in enumerate(tables)))) for k in range(3))]
            outs.append(rows)
        equal[f"decode_{size}"] = all(np.array_equal(a, b) for a, b in zip(*outs, strict=True))
    return equal


def time_decode(runner: CudaModelRunner, batch: int, context: int, steps: int = 24, runs: int = 4) -> float:
    """Milliseconds of a decode step, sampling included and logits not copied to the host, in runs of steps that nobody
    waits for in between: the best run."""
    pages = Pages(runner)
    tables = [pages.take(context + steps + 8) for _ in range(batch)]
    ids = np.random.default_rng(1).integers(0, runner.vocab_size, (steps, batch)).tolist()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        start.record()
        for k in range(steps):
            runner.decode([SequenceStep([ids[k][i]], context + k, tables[i], [0]) for i in range(batch)])
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / steps)
    return min(times[1:])


def time_prefill(runner: CudaModelRunner, tokens: int, repeats: int = 5) -> float:
    pages = Pages(runner).take(tokens)
    ids = np.random.default_rng(2).integers(0, runner.vocab_size, tokens).tolist()
    times = []
    for _ in range(repeats):
        cuda_memory.synchronize()
        begin = time.perf_counter()
        runner.prefill([SequenceStep(ids, 0, pages, [tokens - 1])])
        cuda_memory.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


def time_engine(runner: CudaModelRunner, batch: int, prompt: int, new: int = 128) -> dict[str, float]:
    """The whole engine with Python in the loop, as an offline engine is timed: TTFT until every sequence has its first
    token, then decoding until the first one ends. Greedy, fresh random prompts."""
    engine = Engine(runner, executor=CudaExecutor(runner))
    rng = np.random.default_rng(batch * 7 + prompt)

    def drive(tokens: int) -> tuple[float, float, int]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        begin = time.perf_counter()
        requests = [engine.add(rng.integers(0, runner.vocab_size, prompt).tolist(), params) for _ in range(batch)]
        while not all(r.first_token_time for r in requests):
            engine.step()
        first = time.perf_counter()
        had = sum(len(r.sequences[0].output_ids) for r in requests)
        while not any(r.finished for r in requests):
            engine.step()
        decoded = sum(len(r.sequences[0].output_ids) for r in requests) - had
        seconds = time.perf_counter() - first
        while engine.has_work:
            engine.step()
        return (first - begin) * 1e3, seconds, decoded

    drive(8)
    runs = [drive(new) for _ in range(3)]
    return {"ttft_ms": round(statistics.median(r[0] for r in runs), 2),
            "tokens_per_second": round(statistics.median(r[2] / r[1] for r in runs))}


def read_bandwidth() -> float:
    """GB/s of a plain read of 4 GB."""
    x = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(8):
        start.record()
        x.sum()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 4 * (1 << 30) / min(times) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--contexts", default="512,2048")
    parser.add_argument("--prefill", default="128,512,2048,8192")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    stem = args.folder / f"{args.model}-{args.weights}"
    description = json.loads(Path(f"{stem}.json").read_text())
    info = ModelInfo.from_json(description["info"])
    device_for("cuda")
    bandwidth = read_bandwidth()
    tensors, plain = make_parameters(description)
    sizes = {p["name"]: int(np.prod(p["shape"])) * (2 if "16" in p["dtype"] else 4) for p in description["parameters"]}
    weight_bytes = sum(sizes.values())
    embedding_bytes = sum(size for name, size in sizes.items() if name.startswith("model.embed_tokens"))
    weights = sum(from_json(p["recipe"]).out_features * from_json(p["recipe"]).in_features for p in description["parameters"]
                  if isinstance(from_json(p["recipe"]), Pack) and from_json(p["recipe"]).suffix in ("", "codes"))
    most = max(map(int, args.batches.split(","))) * (max(map(int, args.contexts.split(","))) + 160)
    pages = 1 + max(most // info.page_size + 1024, 8192 // info.page_size + 64)
    library = Path(f"{stem}.so")
    runner = load(library, description, tensors, pages)
    result: dict[str, Any] = {"model": args.model, "weights": args.weights, "gpu": torch.cuda.get_device_name(),
                              "read_GBps": round(bandwidth), "weight_bytes": weight_bytes,
                              "arena_bytes": description["arena_bytes"]}

    def add(section: str, row: dict[str, Any]) -> None:
        """Also to the file: a run that is cut short keeps what it has."""
        result.setdefault(section, []).append(row)
        print(row, flush=True)
        args.out.write_text(json.dumps(result, indent=1))

    if not args.no_check:
        result["errors"] = check(runner, Reference(description, plain))
        ids = np.random.default_rng(5).integers(0, info.vocab_size, 203).tolist()
        exact = Reference(description, plain)(ids)
        rounded = Reference(description, plain, torch.bfloat16)(ids)
        result["errors"]["torch_bfloat16"] = float((rounded - exact).norm() / exact.norm())
        if description.get("activations") == "fp8":
            rounding = Reference(description, plain, rounds=True)
            result["errors"]["activations_in_fp8"] = float((rounding(ids) - exact).norm() / exact.norm())
            result["errors_against_rounded"] = check(runner, rounding)
            print("against rounded activations", json.dumps(result["errors_against_rounded"]), flush=True)
        print(json.dumps(result["errors"], indent=0), flush=True)
    plain_launches = load(library, description, tensors, max(4096, pages), graphs=False)
    result["graph_equals_eager"] = graph_equals_eager(runner, plain_launches)
    print("graph equals eager", result["graph_equals_eager"], flush=True)
    result["eager_decode_ms"] = {b: round(time_decode(plain_launches, b, 512), 4) for b in map(int, args.batches.split(","))}
    print("decode without graphs, ms", result["eager_decode_ms"], flush=True)
    del plain_launches
    begin = time.perf_counter()
    runner.warm_up()
    result["capture_seconds"] = round(time.perf_counter() - begin, 2)
    free, total = cuda_memory.free_and_total()
    result["device_bytes_used"] = total - free
    read = weight_bytes - (0 if description["tie_embeddings"] else embedding_bytes)
    for context in map(int, args.contexts.split(",")):
        for batch in map(int, args.batches.split(",")):
            ms = time_decode(runner, batch, context)
            kv = batch * context * 2 * info.num_layers * info.num_kv_heads * info.head_dim * 2
            floor = (read + kv) / bandwidth / 1e6
            add("decode", {"context": context, "batch": batch, "ms": round(ms, 4),
                           "tokens_per_second": round(batch / ms * 1e3),
                           "floor_ms": round(floor, 4), "share_of_floor": round(floor / ms, 3)})
    for context in map(int, args.contexts.split(",")):
        for batch in map(int, args.batches.split(",")):
            add("engine", {"prompt": context, "batch": batch, **time_engine(runner, batch, context)})
    for tokens in map(int, args.prefill.split(",")):
        ms = time_prefill(runner, tokens)
        flops = 2 * tokens * (weights - info.vocab_size * info.hidden_size * (1 if description["tie_embeddings"] else 2))
        add("prefill", {"tokens": tokens, "ms": round(ms, 3), "TFLOPs": round(flops / ms / 1e9, 1)})


if __name__ == "__main__":
    main()
