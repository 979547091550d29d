"""On a GPU machine: logits and greedy tokens of models in true shapes against transformers with the very same weights.

    PYTHONPATH=.:SITE python benchmarks/gpu/against_transformers.py FOLDER --models llama-3.2-1b,qwen3-8b [--weights q4_128]
        --out RESULT.json

FOLDER holds what `build_models.py` made. Weights are random (see `run_models.py`); transformers has them unpacked. It runs
once in bfloat16, as it would serve, and once in float32, which judges both. Our greedy tokens are held against its choice
after the same prefix: where they differ, the two candidates must lie closer in float32 than twice what bfloat16 costs
transformers in that row (a tie), or where our build rounds activations to fp8, twice what that costs us there.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from run_models import load, make_parameters

from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import SequenceStep, StepPlan

PROMPTS, NEW = (203, 16, 77, 515), 32
TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def peer(description: dict[str, Any], plain: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """transformers' model of the same architecture with the same weights, bfloat16, on the GPU; and the weights as they are,
    under its names."""
    info = description["info"]
    config = transformers.AutoConfig.for_model(
        TYPES[info["architecture"]], hidden_size=info["hidden_size"], intermediate_size=description["intermediate_size"],
        num_hidden_layers=info["num_layers"], num_attention_heads=info["num_heads"],
        num_key_value_heads=info["num_kv_heads"], head_dim=info["head_dim"],
        vocab_size=info["vocab_size"], max_position_embeddings=info["max_context"],
        rms_norm_eps=description["epsilon"], rope_theta=description["rope_theta"],
        tie_word_embeddings=description["tie_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": description["rope_theta"]})
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    sizes = [info["num_heads"] * info["head_dim"], *[info["num_kv_heads"] * info["head_dim"]] * 2]
    state: dict[str, torch.Tensor] = {}
    for name, weight in plain.items():
        if "q_proj+k_proj+v_proj" in name:
            for part, cut in zip("qkv", weight.split(sizes), strict=True):
                state[name.replace("q_proj+k_proj+v_proj", f"{part}_proj")] = cut
        elif "gate_proj+up_proj" in name:
            for part, cut in zip(("gate", "up"), weight.chunk(2), strict=True):
                state[name.replace("gate_proj+up_proj", f"{part}_proj")] = cut
        else:
            state[name] = weight
    known = set(model.state_dict())
    if extra := {name for name in state if name not in known}:
        raise SystemExit(f"transformers has no {sorted(extra)[:4]}")
    missing, _ = model.load_state_dict(state, strict=False)
    if missing and not (description["tie_embeddings"] and missing == ["lm_head.weight"]):
        raise SystemExit(f"transformers got no {missing[:4]}")
    return model.eval().requires_grad_(False), state


def generate(runner: CudaModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine(runner, executor=CudaExecutor(runner))
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    requests = [engine.add(p, params) for p in prompts]
    while engine.has_work:
        engine.step()
    return [list(r.sequences[0].output_ids) for r in requests]


def logits_of(runner: CudaModelRunner, ids: list[int], prompt: int) -> torch.Tensor:
    """Float32 `[NEW, V]`: after the prompt (prefill) and after each further token but the last (decode steps)."""
    pages = list(range(1, 2 + len(ids) // runner.page_size))
    rows = [np.array(runner.forward(StepPlan((SequenceStep(ids[:prompt], 0, pages, [prompt - 1]),)))[0])]
    for k in range(prompt, len(ids) - 1):
        rows.append(np.array(runner.forward(StepPlan((SequenceStep([ids[k]], k, pages, [0]),)))[0]))
    return torch.from_numpy(np.array(rows)).cuda().float()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def compare(folder: Path, name: str, weights: str) -> dict[str, Any]:
    stem = folder / f"{name}-{weights}"
    description = json.loads(Path(f"{stem}.json").read_text())
    tensors, plain = make_parameters(description)
    runner = load(Path(f"{stem}.so"), description, tensors)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, runner.vocab_size, n).tolist() for n in PROMPTS]
    crowd, alone = generate(runner, prompts), [generate(runner, [p])[0] for p in prompts]
    ours = [logits_of(runner, p + a, len(p)) for p, a in zip(prompts, alone, strict=True)]
    del runner, tensors
    gc.collect()
    model, state = peer(description, plain)
    ids = [torch.tensor([p + a], device="cuda") for p, a in zip(prompts, alone, strict=True)]
    with torch.inference_mode():
        theirs = [model(i, logits_to_keep=NEW + 1).logits[0, :-1].float() for i in ids]
        model = model.float()
        model.load_state_dict(state, strict=False)      # a quantised weight is not rounded to bfloat16 here
        exact = [model(i, logits_to_keep=NEW + 1).logits[0, :-1] for i in ids]
    result: dict[str, Any] = {
        "error": max(map(relative, ours, exact)), "transformers_bfloat16_error": max(map(relative, theirs, exact)),
        "tokens": NEW * len(prompts), "differing": 0, "ties": 0, "worst_gap_over_tolerance": 0.0, "not_ties": []}
    rounds = description.get("activations") == "fp8"
    for prompt, (mine, chosen) in enumerate(zip(alone, theirs, strict=True)):
        best, judged = chosen.argmax(-1).tolist(), ours[prompt] if rounds else chosen
        for step, (a, b) in enumerate(zip(mine, best, strict=True)):
            if a == b:
                continue
            row = exact[prompt][step]
            gap, tolerance = float((row[a] - row[b]).abs()), 2 * float((judged[step] - row).abs().max())
            result["differing"] += 1
            result["ties"] += gap <= tolerance
            result["worst_gap_over_tolerance"] = max(result["worst_gap_over_tolerance"], gap / tolerance)
            if gap > tolerance:
                result["not_ties"].append({"prompt": PROMPTS[prompt], "step": step, "gap": gap, "tolerance": tolerance})
    first = [next((k for k, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), None)
             for x, y in zip(crowd, alone, strict=True)]
    result["crowd_equals_alone_until"] = [NEW if k is None else k for k in first]
    result["crowd_divergences"] = [_divergence(exact[i][k], (ours if rounds else theirs)[i][k], crowd[i][k], alone[i][k])
                                   for i, k in enumerate(first) if k is not None]
    return result


def _divergence(exact: torch.Tensor, judged: torch.Tensor, one: int, other: int) -> dict[str, float]:
    return {"gap": float((exact[one] - exact[other]).abs()), "tolerance": 2 * float((judged - exact).abs().max())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", required=True)
    parser.add_argument("--weights", default="bf16", help="of the builds: bf16, q4_128, fp8, fp8-a8, ...")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    results: dict[str, Any] = {"transformers": transformers.__version__, "torch": torch.__version__, "weights": args.weights,
                               "models": {}}
    for name in args.models.split(","):
        begin = time.perf_counter()
        try:
            found = compare(args.folder, name, args.weights)
        except Exception as error:      # the other models still have their turn
            found = {"failure": f"{type(error).__name__}: {error}"[:600]}
        gc.collect()
        torch.cuda.empty_cache()
        results["models"][name] = {**found, "seconds": round(time.perf_counter() - begin, 1)}
        args.out.write_text(json.dumps(results, indent=1))
        print(name, json.dumps(results["models"][name]), flush=True)


if __name__ == "__main__":
    main()
