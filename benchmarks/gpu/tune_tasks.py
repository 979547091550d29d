"""Which CUDA kernels are tuned for which models and rows, the most valuable first, and all candidates as compiled libraries
with an index. Runs where a compiler is; the GPU machine reads the index alone (`tune_device.py`).
"""

from __future__ import annotations

import json
import lzma
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.matmul_variants import LINEARS
from relaxpack.kernel_spec import AttentionSpec, Kernel, LinearSpec, NormSpec
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.weight_format import FORMATS

TARGET = "cuda:sm_90a"
ROWS = (1, 4, 8, 16, 64, 512, 4096)
MORE_ROWS = (2, 32, 128, 256, 2048)
BESIDE_ROWS = 128               # up to here a kernel is also timed beside its neighbour, as in a captured step
PER_MODULE = 24                 # kernels of a library: bounds the cost of one compiler run
HIDDEN = {"1b": 2048, "8b": 4096, "7b": 3584}
HEADS = {"1b": (32, 8, 64), "8b": (32, 8, 128), "7b": (28, 4, 128)}
NORM_ROWS = (1, 8, 64, 512, 4096)
ATTENTION_CASES = {1: ((1, 512), (1, 2048), (1, 8192)), 8: ((1, 512), (1, 2048), (8, 512), (8, 2048)),
                   64: ((1, 512), (8, 2048), (64, 512), (64, 2048))}      # bucket → (sequences, tokens behind each)
INDEX = "tune.json"


@dataclass
class Job:
    """One workload at one number of rows. `cases` say on what inputs; the geometric mean of their times counts."""

    name: str
    family: str
    spec: Any
    bucket: int
    cases: Sequence[dict[str, Any]]
    beside: NormSpec | None = None      # the neighbour in a step; it reads y, or writes x where `before`
    before: bool = False
    only: Callable[[dict[str, Any]], bool] = field(default=lambda choice: True)


def jobs() -> list[Job]:
    """In the order in which they are tuned: what the issue asks for, then the other models, then quantised weights."""
    found = [linear_job(f"8b.{part}", rows) for rows in ROWS for part in ("qkv", "o", "gate_up", "down")]
    found += [norm_job("8b", residual) for residual in (True, False)]
    found += [attention_job("8b", bucket) for bucket in ATTENTION_CASES]
    others = [linear_job(f"{model}.{part}", rows) for rows in ROWS for model in ("1b", "7b")
              for part in ("qkv", "o", "gate_up", "down")]
    packed = [linear_job(f"8b.{part}", rows, "q4_1") for rows in (1, 8, 16, 64) for part in ("o", "gate_up", "qkv", "down")]
    small = [norm_job(model, True) for model in ("1b", "7b")]
    small += [attention_job(model, bucket) for bucket in ATTENTION_CASES for model in ("1b", "7b")]
    heads = [linear_job(f"{model}.head", rows) for rows in (1, 8, 16) for model in ("8b", "1b")]
    more = [linear_job(f"{model}.{part}", rows) for rows in MORE_ROWS for model in ("8b", "1b", "7b")
            for part in ("qkv", "o", "gate_up", "down")]
    packed_more = [linear_job(f"8b.{part}", rows, weight) for weight in ("q4_0", "q8_0", "fp8") for rows in (1, 8, 16)
                   for part in ("o", "gate_up", "down")]
    return found + small[:1] + packed[:4] + others + packed[4:] + small[1:] + heads + more + packed_more


def linear_spec(linear: str, rows: int, weight: str = "bf16") -> LinearSpec:
    """The question that a build for bfloat16 asks about this matrix."""
    n, k, swiglu = LINEARS[linear]
    out = "float32" if linear.endswith(".head") else "bfloat16"
    return LinearSpec(n, k, FORMATS[weight], "decode", "bfloat16", out, bias=linear == "7b.qkv",
                      glu="swiglu" if swiglu else None, max_rows=rows)


def linear_job(linear: str, rows: int, weight: str = "bf16") -> Job:
    spec = linear_spec(linear, rows, weight)
    case = {"kind": "linear", "rows": rows, "n": spec.out_features, "k": spec.in_features, "weight": weight,
            "swiglu": spec.gated, "bias": spec.bias, "out_dtype": spec.out_dtype}
    before = linear.partition(".")[2] in ("qkv", "gate_up", "head")
    neighbour = NormSpec(HIDDEN[linear[:2]], 1e-5, "bfloat16", False) if rows <= BESIDE_ROWS else None
    name = f"{linear}@{rows}" if weight == "bf16" else f"{linear}.{weight}@{rows}"
    return Job(name, "cuda.linear", spec, rows, [case], neighbour, before)


def norm_job(model: str, residual: bool) -> Job:
    spec = NormSpec(HIDDEN[model], 1e-5, "bfloat16", residual)
    cases = [{"kind": "norm", "rows": rows, "h": spec.hidden_size, "residual": residual} for rows in NORM_ROWS]
    return Job(f"{model}.{'add_norm' if residual else 'norm'}", "cuda.norm", spec, 1, cases)


def attention_job(model: str, bucket: int) -> Job:
    heads, kv_heads, dim = HEADS[model]
    spec = AttentionSpec(2, heads, kv_heads, dim, dim, 16, 512, 8192, "bfloat16", "bfloat16", dim ** -0.5)
    cases = [{"kind": "decode_attention", "rows": count, "tokens": tokens, "spec": asdict(spec)}
             for count, tokens in ATTENTION_CASES[bucket]]
    return Job(f"{model}.decode_attention@{bucket}", "cuda.decode_attention", spec, bucket, cases,
               only=lambda choice: _likely_split(choice, bucket))


def _likely_split(choice: dict[str, Any], bucket: int) -> bool:
    """A quarter of the chip is for one sequence, four blocks a multiprocessor for many."""
    blocks = choice["blocks"]
    return (blocks >= 132 or bucket == 1) and (blocks <= 264 or bucket > 1) and choice["stages"] <= 3


def candidates(job: Job) -> list[dict[str, Any]]:
    """The rule's choice first."""
    part = families_for(parse_target(TARGET))[job.family].part(job.spec, job.bucket)
    assert part is not None, job.name
    return [dict(part.space.default), *(choice for choice in part.space.all() if job.only(choice))]


def prepare(folder: Path, chosen: Sequence[Job]) -> None:
    """All candidates, compiled, into libraries in the order of the jobs, and `INDEX`."""
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    from relaxpack.fingerprint import compiler_fingerprint
    from relaxpack.schedules.cuda_compile import compile_module
    from relaxpack.tuning_record import canonical

    target, start = parse_target(TARGET), time.perf_counter()
    families = families_for(target)
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = {}               # canonical description of a kernel → function
    funcs: dict[str, Any] = {}
    tasks: list[dict[str, Any]] = []

    def entry(kernel: Kernel, key: object) -> dict[str, Any]:
        stages = []
        for number, stage in enumerate(kernel.stages):
            described = canonical([key, number])
            if described not in names:
                names[described] = f"k{len(names)}"
                funcs[names[described]] = stage.func
            stages.append({"function": names[described], "arguments": [*stage.inputs, *stage.outputs]})
        return {"stages": stages, "temporaries": {name: [list(shape), dtype]
                                                  for name, (shape, dtype) in kernel.temporaries.items()}}

    for job in chosen:
        family, found = families[job.family], []
        for choice in candidates(job):
            kernel = family.make(job.spec, choice)
            spec = replace(job.spec, max_rows=None) if isinstance(job.spec, LinearSpec) else job.spec
            key = [job.family, asdict(spec), choice, [stage.name for stage in kernel.stages]]
            found.append({"choice": choice, **entry(kernel, key)})
        task = {"name": job.name, "bucket": job.bucket, "cases": list(job.cases), "candidates": found,
                "workload": asdict(family.workload(job.spec, _label(job)))}
        if job.beside is not None:
            neighbour = families["cuda.norm"].make(job.beside, {"dependent_launch": True})
            task["beside"] = {"before": job.before, "h": job.beside.hidden_size,
                              **entry(neighbour, ["beside", asdict(job.beside)])}
        if isinstance(job.spec, LinearSpec) and job.spec.weight.quantized:
            from relaxpack.schedules.kernels.cuda.linear import unpacked

            task["unpack"] = entry(unpacked(job.spec, True), ["unpack", asdict(replace(job.spec, max_rows=None))])
            task["unpack"]["stages"] = task["unpack"]["stages"][:1]
        tasks.append(task)
    needed = dict.fromkeys(stage["function"] for task in tasks for one in _launched(task) for stage in one["stages"])
    libraries: dict[str, str] = {}
    order = list(needed)
    for number, first in enumerate(range(0, len(order), PER_MODULE)):
        part, library = order[first:first + PER_MODULE], folder / f"tune-{number}.so"
        module = tvm.IRModule({name: funcs[name].with_attr("global_symbol", name) for name in part})
        compile_module(module, target).export_library(str(library))
        library.with_suffix(".so.xz").write_bytes(lzma.compress(library.read_bytes(), preset=6))
        library.unlink()
        libraries |= dict.fromkeys(part, library.name)
        print(f"{first + len(part)} of {len(order)} kernels, {time.perf_counter() - start:.0f} s", flush=True)
    index = {"tasks": tasks, "libraries": libraries, "compiler": dict(compiler_fingerprint("cuda"))}
    (folder / f"{INDEX}.xz").write_bytes(lzma.compress(json.dumps(index).encode()))
    size = sum(path.stat().st_size for path in folder.iterdir())
    count = sum(len(task["candidates"]) for task in tasks)
    print(f"{len(tasks)} tasks, {count} candidates, {len(order)} kernels, {size / 1e6:.1f} MB")


def _launched(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from task["candidates"]
    yield from (task[name] for name in ("beside", "unpack") if name in task)


def _label(job: Job) -> str:
    spec = job.spec
    if isinstance(spec, LinearSpec):
        return f"linear_{spec.out_features}x{spec.in_features}"
    return f"norm_{spec.hidden_size}" if isinstance(spec, NormSpec) else "decode_attention"
