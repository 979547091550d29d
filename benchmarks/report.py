"""docs/performance.md from the newest results in benchmarks/results: every number in it comes from a committed file.

    python benchmarks/report.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("llama-3.2-1b", "llama-3.1-8b")


def newest(pattern: str) -> tuple[str, Any] | None:
    """(file name, parsed JSON or JSON lines) of the newest file by the date in its name; a day's second ends in -2."""
    files = sorted(RESULTS.glob(pattern), key=lambda path: path.stem)
    if not files:
        return None
    text = files[-1].read_text()
    data = [json.loads(line) for line in text.splitlines()] if files[-1].suffix == ".jsonl" else json.loads(text)
    return files[-1].name, data


def section(name: str) -> tuple[str, Any] | None:
    """(file, result) of a section of the newest visit to a GPU, where it succeeded."""
    if (found := newest("gpu_visit_*.json")) is None:
        return None
    had = found[1]["sections"].get(name, {})
    return (found[0], had["result"]) if had.get("ok") and had.get("result") else None


def table(header: list[str], rows: list[list[Any]]) -> list[str]:
    line = "| " + " | ".join(header) + " |"
    return [line, "|" + "---|" * len(header), *("| " + " | ".join(map(str, row)) + " |" for row in rows), ""]


def cpu() -> list[str]:
    found = newest("cpu_peers-*.json")
    if found is None:
        return []
    name, data = found
    env = data["environment"]
    systems = [s for s in next(iter(data["median"].values())) if not s.startswith("ratio")]
    rows = [[key.replace("_", " "), *(f"{values[s]:.0f}" for s in systems),
             f"{values['ratio_to_llama.cpp']:.2f}x"] for key, values in data["median"].items()]
    return ["## CPU: SmolLM2-135M-Instruct, the same Q4_1 GGUF", "",
            f"{env['cpu']}, {env['threads']} threads, {env['date']}; tokens per second, median of {len(data['rounds'])} "
            f"rounds in turn. `benchmarks/cpu_peers.py`, results/{name}.", "",
            *table(["", *systems, "relaxpack / llama.cpp"], rows)]


def cpu_batch() -> list[str]:
    lines = []
    if (found := newest("cpu_batch-*.json")) is not None:
        name, data = found
        rows = [[batch, f"{v['relaxpack']:.0f}", f"{v['llama.cpp']:.0f}", f"{v['ratio']:.2f}x"]
                for batch, v in data["median"].items()]
        lines += ["Several sequences decoded together, beside llama.cpp's batch API; tokens per second in all. "
                  f"`benchmarks/cpu_batch.py`, results/{name}.", "",
                  *table(["sequences", "relaxpack", "llama.cpp", "ratio"], rows)]
    return lines


def serving() -> list[str]:
    """The server: beside llama.cpp's, what its prefix cache saves, and the soak."""
    lines: list[str] = []
    if (found := newest("serve_peers-*.json")) is not None:
        name, data = found
        rows = [[streams, f"{v['relaxpack']:.0f}", f"{v['llama.cpp']:.0f}", f"{v['ratio']:.2f}x",
                 f"{v['gain of relaxpack']:.2f}x", f"{v['gain of llama.cpp']:.2f}x"]
                for streams, v in data["median"].items()]
        lines += ["Beside llama.cpp's server (`--parallel 8`), the same requests in turn: "
                  f"{data['prompt_tokens']} prompt and {data['output_tokens']} output tokens each, greedy, "
                  f"{data['threads']} threads; output tokens per second in all, median of {len(data['rounds'])} rounds; "
                  f"load average before: {data['load_average_before']:.1f}. "
                  f"`benchmarks/serve_peers.py`, results/{name}.", "",
                  *table(["streams", "relaxpack", "llama.cpp", "ratio", "over 1 stream", "llama.cpp over 1"], rows)]
    if (found := newest("prefix-*.json")) is not None:
        name, data = found
        rows = [[{"engine": "engine", "http": "HTTP"}[where], f"{data[where]['cold'] * 1e3:.0f}",
                 f"{data[where]['warm'] * 1e3:.0f}", f"{data[where]['falls_by']:.1%}"] for where in ("engine", "http")]
        lines += [f"Time to the first token of a prompt whose first {data['shared_tokens']} tokens are known (warm) or not "
                  f"(cold), and {data['own_tokens']} are its own. `benchmarks/prefix.py`, results/{name}.", "",
                  *table(["", "cold ms", "warm ms", "falls by"], rows)]
    if (found := newest("engine_overhead-*.json")) is not None:
        name, data = found
        step = data["step_us"]
        lines += [f"The engine itself, on a device that answers at once: {step['median']:.0f} us a decode step at batch "
                  f"{data['batch']} (median; {step['cpu_mean']:.0f} us of processor time). `benchmarks/engine_overhead.py`, "
                  f"results/{name}.", ""]
    if (found := newest("http_overhead-*.json")) is not None:
        name, data = found
        rows = [[r["streams"], f"{r['step_ms']:g}", f"{r['us_per_token']:.0f}", r["tokens_per_second"],
                 f"{r['tokens_per_chunk']:.1f}"] for r in data["rows"]]
        env = data["environment"]
        lines += ["The whole server on such a device, steps of a given length, streamed completions: processor time of a "
                  "token from the engine to the socket, and what one process gave (load average "
                  f"{env['load_average']:.0f} on {env['cores']} cores). `benchmarks/http_overhead.py`, results/{name}.", "",
                  *table(["clients", "step ms", "us a token", "tokens per second", "tokens a chunk"], rows)]
    if (found := newest("soak-*.json")) is not None:
        name, data = found
        parts = data["parts"]
        rows = [[number, part["requests"], part["left_early"], f"{part['memory_mb']:.1f}", part["open_files"],
                 f"{part['server_cores']:.2f}"] for number, part in enumerate(parts, 1)]
        lines += [f"Soak: {data['minutes']:g} minutes, {data['clients']} clients at once of all kinds, so that there is "
                  "always more to do than the server can (load average at the end: "
                  f"{data['environment']['load_average']:.0f} on {data['environment']['cores']} cores; what other work left "
                  "of them is in the last column). "
                  f"{sum(p['requests'] for p in parts)} requests, {sum(p['left_early'] for p in parts)} clients hung up "
                  "early; "
                  f"{'nothing was left over and nobody waited in vain' if not data['problems'] else data['problems']}. "
                  f"`benchmarks/soak.py`, results/{name}.", "",
                  *table(["part", "requests", "hung up", "memory MB", "files open", "cores used"], rows)]
    return ["## The server on a CPU: SmolLM2-135M-Instruct", "", *lines] if lines else []


def gpu(model: str) -> list[str]:
    found = newest(f"gpu_{model}_bf16_*.json")
    if found is None:
        return []
    name, data = found
    peer = newest(f"gpu_vllm_{model}_*.jsonl")
    theirs = {(r["prompt"], r["batch"]): r for r in (peer[1] if peer else []) if r.get("bench") == "gpu_decode"}
    second = section(f"transformers_{model}")
    eager = {(second[1]["prompt"], r["batch"]): r for r in second[1]["rows"]} if second else {}
    rows = []
    for row in data["engine"]:
        other = theirs.get((row["prompt"], row["batch"]), {})
        rate = other.get("decode_tok_s")
        rows.append([row["prompt"], row["batch"], row["tokens_per_second"], f"{rate:.0f}" if rate else "",
                     f"{row['tokens_per_second'] / rate:.2f}x" if rate else "", row["ttft_ms"], other.get("ttft_ms", ""),
                     f"{eager[key]['tokens_per_second']:.0f}" if (key := (row["prompt"], row["batch"])) in eager else ""])
    launched = data.get("eager_decode_ms", {})
    steps = [[r["context"], r["batch"], r["ms"], launched.get(str(r["batch"]), "") if r["context"] == 512 else "",
              r["floor_ms"], f"{r['share_of_floor']:.0%}"] for r in data["decode"]]
    prefill = [[r["tokens"], r["ms"], r["TFLOPs"]] for r in data["prefill"]]
    errors = data.get("errors", {})
    return [f"## {data['gpu']}: {model} in bfloat16", "",
            f"Random weights in the published shapes. Whole engine, Python included, greedy; results/{name}"
            + (f", vLLM on an H200 on the day in its name: results/{peer[0]}" if peer else "")
            + (f", transformers (eager): results/{second[0]}" if second else "") + ".", "",
            *table(["prompt", "batch", "tok/s", "vLLM tok/s", "ratio", "TTFT ms", "vLLM TTFT ms", "transformers tok/s"],
                   rows),
            "One decode step as a graph, sampling included, against its floor (weights and KV over "
            f"{data['read_GBps']} GB/s measured read), and the same kernels launched one by one:", "",
            *table(["context", "batch", "ms", "without graphs", "floor ms", "share"], steps),
            "Prefill of one prompt:", "", *table(["tokens", "ms", "TFLOP/s"], prefill),
            "Relative error of logits against float32 math on the same weights: "
            + ", ".join(f"{key} {value:.3f}" for key, value in errors.items())
            + ". The last one is plain torch in bfloat16: the dtype's own error. Captured steps have the bits of the same "
            f"kernels launched one by one: {', '.join(k for k, same in data['graph_equals_eager'].items() if same)}; "
            f"capturing all buckets took {data['capture_seconds']} s.", ""]


def gpu_serving(model: str) -> list[str]:
    """Whole servers on a GPU: every system of the result, case by case."""
    if (found := newest(f"gpu_serve_{model}_*.json")) is None:
        return []
    name, data = found
    systems = {system: run for system, run in data["systems"].items() if run["cases"]}
    rows = []
    for case, workload in data["workloads"].items():
        ours = systems.get("relaxpack", {"cases": {}})["cases"].get(case)
        for system, run in systems.items():
            if (r := run["cases"].get(case)) is None:
                continue
            ratio = f"{ours['output_tokens_per_second'] / r['output_tokens_per_second']:.2f}x" \
                if ours and system != "relaxpack" else ""
            times = [f"{1e3 * r[key][at]:.{digits}f}" for key, digits in (("time_to_first_token", 0), ("time_per_token", 2))
                     for at in ("p50", "p99")]
            rows.append([case if workload["concurrency"] else f"{workload['rate']:g} a second", system,
                         f"{r['output_tokens_per_second']:.0f}", ratio, f"{r['total_tokens_per_second']:.0f}", *times,
                         f"{r['server_cores']:.2f}", r["tokens_per_chunk"]])
    lines = [f"## Servers on {data['gpu']}: {model} in bfloat16", "",
             "Whole servers over HTTP with streamed answers, the same requests one server after the other: "
             f"{data['prompt_tokens']} prompt tokens (all different) and {data['output_tokens']} output tokens, so many "
             "clients at once; or arrivals a second with lengths as people have them. Times in ms; the ratio is relaxpack's "
             "rate over the peer's. Cores: processor time of all processes of a server over the time. Seconds until it "
             "answered: "
             + ", ".join(f"{system} {run['start_seconds']:.0f}" for system, run in systems.items())
             + f". `benchmarks/gpu/serve_peers.py`, results/{name}."]
    return [*lines, "", *table(["clients", "server", "output tok/s", "relaxpack / it", "all tok/s", "TTFT p50", "p99",
                                "per token p50", "p99", "cores", "tokens a chunk"], rows)]


def timelines() -> list[str]:
    """Where a captured step spends its time, kernel by kernel."""
    lines = []
    for model in MODELS:
        if (found := section(f"timeline_{model}")) is None:
            continue
        name, data = found
        for batch, step in data["batches"].items():
            rows = [[row["count"], f"`{row['name'].removesuffix('_kernel')}`", row["step_grows_us"], row["own_us"],
                     f"{row['total_us'] / step['step_us']:.0%}"] for row in step["by_kernel"][:10]]
            lines += [f"{model}, batch {batch}, context {data['context']}: {step['step_us']:.0f} us a step, "
                      f"{step['kernels']} kernels, {step['kernels_us']:.0f} us when their own times are added up (dependent "
                      f"launches overlap), {step['idle_us']:.0f} us in which no kernel ran. results/{name}", "",
                      *table(["launches", "kernel", "grows the step by us", "own us", "share"], rows)]
    return ["## Inside a captured step", "", *lines] if lines else []


def parity() -> list[str]:
    if (found := section("against_transformers")) is None:
        return []
    name, data = found
    rows = [[model, f"{r['error']:.3f}", f"{r['transformers_bfloat16_error']:.3f}", r["tokens"] - r["differing"],
             f"{r['ties']} of {r['differing']}", f"{r['worst_gap_over_tolerance']:.2f}"]
            for model, r in data["models"].items()]
    return ["## The same numbers as transformers", "",
            "Same random weights, true shapes; both in bfloat16, both held against transformers in float32. Relative errors "
            "of the worst row of logits. Greedy tokens of 32 steps of four prompts against transformers' choice after the "
            "same prefix; where they differ, the two candidates must lie closer in float32 than twice what bfloat16 costs "
            f"transformers in that row. `benchmarks/gpu/against_transformers.py`, results/{name}.", "",
            *table(["model", "error", "transformers' error", "equal tokens of 128", "ties", "worst gap / tolerance"], rows)]


def visit() -> list[str]:
    """Loading, capture, memory: what `make gpu` found beside speeds."""
    if (found := newest("gpu_visit_*.json")) is None:
        return []
    name, data = found
    sections = {key: value.get("result") for key, value in data["sections"].items()}
    loading, rates = sections["loading"], sections["upload"]["gigabytes_per_second"]
    captured, compared = loading["capture"], loading["after_capture"]
    beside = captured["bytes"] - captured.get("arena", loading["load"]["memory_plan"]["arena"])
    rows = [["process start to first token, Llama-3.1-8B, files in the page cache",
             f"{data['sections']['first_token']['seconds']:.1f} s"],
            ["weights to the device", f"{loading['load']['weights_gigabytes_per_second']:.1f} GB/s"],
            *[[f"upload in {kind}", f"{rate:.1f} GB/s"] for kind, rate in rates.items()],
            ["planned memory against the driver's", f"{compared['difference']:+.2%} of {compared['taken'] / 1e9:.1f} GB"],
            [f"capture of {captured['graphs']} graphs",
             f"{captured['seconds']:.2f} s, {beside / 1e6:.0f} MB beside the arena"]]
    return ["## Start, memory and capture on the H200", "", f"`make gpu`, results/{name}.", "",
            *table(["what", "measured"], rows)]


def extras() -> list[str]:
    if (found := newest("gpu_llama-3.1-8b_q4_1_*.json")) is None:
        return []
    name, data = found
    rows = [[r["prompt"], r["batch"], r["tokens_per_second"], r["ttft_ms"]] for r in data["engine"]]
    return ["## Llama-3.1-8B in q4_1 (head and table q8_0)", "", f"results/{name}", "",
            *table(["prompt", "batch", "tok/s", "TTFT ms"], rows)]


def tuned() -> list[str]:
    if (found := newest("gpu_tuned-*.json")) is None:
        return []
    name, data = found
    rows = [[r["task"], r["case"], *(f"{r[key]:.1f}" for key in ("rule_us", "tuned_us")),
             f"{r['torch_us']:.1f}" if r["torch_us"] else "", f"{r['roofline_us']:.1f}", f"{r['share']:.0%}",
             f"{r['gain']:.2f}x"]
            for r in data["rows"] if r["task"].startswith("8b")]
    return ["## Tuned kernels on the H200: Llama-3.1-8B", "",
            f"us; torch is cuBLAS and SDPA in the same run, the roofline that of {data['ceilings']['read_tb_s']:.2f} TB/s "
            f"and {data['ceilings']['gemm_tflop_s']:.0f} TFLOP/s measured there. Times are those alone; the gain of a "
            "decode kernel is that by which whole layers became faster, as a part of its own time, so a kernel that is no "
            f"faster alone may have one. `benchmarks/gpu/tune.py`, results/{name}.{_declared(data)}", "",
            *table(["kernel", "case", "rule", "tuned", "torch", "roofline", "rule / roofline", "gain"], rows),
            *_tuned_steps()]


def _declared(data: dict[str, Any]) -> str:
    if (judged := data.get("declared")) is None:
        return ""
    below = judged["below_80_percent"]
    return (" Of the set declared beforehand (the four matmuls in bf16 and q4_1 at 1, 4, 8, 16, 64, 512 and 4096 rows, "
            "norms, attention), as far as this file has it (what was measured with kernels that changed since is not in "
            "it): "
            f"{judged['geometric_mean_gain']:.3f}x over {judged['cases']} cases, "
            f"{below['geometric_mean_gain']:.3f}x over the {below['cases']} below 80 %.")


def _tuned_steps() -> list[str]:
    if (found := newest("gpu_tuned_steps-*.json")) is None:
        return []
    name, data = found
    rows = [[stem, f"{r['batch']}", f"{r['context']}", f"{r['untuned_ms']:.3f}", f"{r['tuned_ms']:.3f}",
             f"{r['ratio']:.3f}", f"{r['ratios'][0]:.3f} to {r['ratios'][1]:.3f}"]
            for stem, model in data["models"].items() for r in model["decode"]]
    return ["", "Whole decode steps with these records and without, two builds on the same weights in turn, ms; the ratio "
            f"is the median of the rounds' ratios. `benchmarks/gpu/tuned_steps.py`, results/{name}.", "",
            *table(["model", "sequences", "tokens behind each", "untuned", "tuned", "tuned / untuned", "of all rounds"],
                   rows)]


def main() -> None:
    lines = ["# Performance", "", "Generated by `python benchmarks/report.py` from `benchmarks/results/`; do not edit.", "",
             *cpu(), *cpu_batch(), *serving(), *(line for model in MODELS for line in (*gpu(model), *gpu_serving(model))),
             *timelines(), *parity(), *visit(), *extras(), *tuned()]
    (ROOT / "docs" / "performance.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
