"""Compile models for a GPU without their weights: OUT/NAME.so and OUT/NAME.json (parameters, model info, buckets).

    python benchmarks/gpu/build_models.py OUT --model llama-3.2-1b [--weights bf16|q4_1|q4_128|q8_0|fp8]
        [--activations fp8]                    # of fp8 weights: OUT/NAME-fp8-a8.so
        [--db seed --gpu "NVIDIA H200"]        # tuned: OUT/NAME-tuned.so
        [--enable SpreadDecode]                # a pass on request: OUT/NAME-SpreadDecode.so

Runs on a machine without a GPU; `run_models.py` makes weights from a seed on the GPU machine and measures.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from models import MODELS, OneFormat

from relaxpack.compile.kernels import kernel_provider, named_machines, records_for
from relaxpack.compile.lowering import Lowered, lower_model
from relaxpack.compile.options import pipeline_config
from relaxpack.compile.storage_summary import storage_summary
from relaxpack.model_info import ModelInfo
from relaxpack.passes.config import ON_REQUEST
from relaxpack.recipe import to_json
from relaxpack.relax_models.export import BuildLimits
from relaxpack.target import parse_target


def _explain(lowered: Lowered) -> dict[str, Any]:
    """What `relaxpack bench latency` needs of the record: what the steps do, without the plan of every tensor."""
    record = lowered.explanation
    plans = {name: {**plan, "tensors": []} for name, plan in record["memory_plan"].items()}
    return {"phases": [], "calls": {}, "kernels": record["kernels"], "steps": record["steps"], "memory_plan": plans}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--activations", choices=("float", "fp8"), default="float", help="as for relaxpack build")
    parser.add_argument("--target", default="cuda:sm_90a")
    parser.add_argument("--max-context", type=int, default=16384)
    parser.add_argument("--max-batch", type=int, default=128)
    parser.add_argument("--prefill-chunk", type=int, default=8192)
    parser.add_argument("--db", action="append", default=[], help="tuning records, as for relaxpack build")
    parser.add_argument("--gpu", help="whose records")
    parser.add_argument("--enable", action="append", default=[], choices=list(ON_REQUEST), help="a pass on request")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for a quick check")
    args = parser.parse_args()
    config = MODELS[args.model]
    if args.layers:
        config = dataclasses.replace(config, num_layers=args.layers, layer_windows=(None,) * args.layers)
    target = parse_target(args.target)
    limits = BuildLimits(args.max_context, args.max_batch, args.prefill_chunk)
    start = time.perf_counter()
    machines = named_machines(args.gpu, [target], args.db)
    with records_for(args.db, target, machines.get(target.name)) as records:
        provider = kernel_provider(target, records, limits, args.activations)
        lowered = lower_model(config, limits, target, provider, OneFormat(args.weights), "bfloat16", "bfloat16",
                              dataclasses.replace(pipeline_config(target, limits), enabled=frozenset(args.enable)),
                              records=records,
                              progress=lambda phase: print(f"{time.perf_counter() - start:7.1f} s {phase}", flush=True))
    marks = ("-a8" if args.activations == "fp8" else "") + ("-tuned" if args.db else "") + "".join(
        f"-{name}" for name in args.enable)
    stem = args.out / f"{args.model}-{args.weights}{marks}"
    args.out.mkdir(parents=True, exist_ok=True)
    lowered.executable.export_library(f"{stem}.so")
    info = ModelInfo(args.model, config.architecture, config.num_layers, config.hidden_size, config.num_heads,
                     config.num_kv_heads, config.head_dim, config.vocab_size, limits.max_context, limits.page_size,
                     "bfloat16", "bfloat16", limits.max_batch, limits.prefill_chunk, None, (), False)
    description = {"info": info.to_json(), "buckets": lowered.buckets,
                   "spread": {str(rows): dataclasses.asdict(costs) for rows, costs in lowered.spread.items()},
                   "arena_bytes": lowered.arena_bytes(),
                   "target": target.to_json(), "memory": {"arena_bytes": lowered.arena_bytes(),
                                                          **storage_summary(lowered.explanation["memory_plan"])},
                   "rope_theta": config.rope.theta, "epsilon": config.norm_epsilon,
                   "intermediate_size": config.intermediate_size, "tie_embeddings": config.tie_embeddings,
                   "activation": config.activation, "embedding_scale": config.embedding_scale,
                   "qkv_bias": config.qkv_bias, "activations": args.activations, "kernels": lowered.explanation["kernels"],
                   "calls": lowered.explanation["calls"],
                   "explain": _explain(lowered),
                   "parameters": [{"name": p.name, "shape": list(p.shape), "dtype": p.dtype,
                                   "recipe": to_json(p.recipe)} for p in lowered.parameters]}
    Path(f"{stem}.json").write_text(json.dumps(description))
    print(f"{stem}.so: {Path(f'{stem}.so').stat().st_size / 1e6:.1f} MB, kernels {lowered.kernel_counts()}, "
          f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
