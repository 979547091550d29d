"""Which CUDA kernels are tuned for which models and rows, the most valuable first, and all candidates as compiled libraries
with an index. Runs where a compiler is; the GPU machine reads the index alone (`tune_device.py`).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.matmul_variants import LINEARS
from relaxpack.errors import CompileError
from relaxpack.kernel_generations import GENERATIONS, kernels_of
from relaxpack.kernel_spec import AttentionSpec, FusedAttentionSpec, Kernel, LinearSpec, NormSpec
from relaxpack.schedules.kernels.cuda.linear import NORM_FAMILIES
from relaxpack.schedules.tuning.cuda_linear_spaces import default_choice
from relaxpack.schedules.tuning.family import KernelFamily
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for
from relaxpack.tuning.chain import Chain
from relaxpack.tuning.cuda_stages import described
from relaxpack.tuning.specs import as_asked, family_and_spec
from relaxpack.tuning.worker import Worker
from relaxpack.tuning_record import Workload, canonical
from relaxpack.weight_format import FORMATS

TARGET = "cuda:sm_90a"
ROWS = (1, 4, 8, 16, 64, 512, 4096)
MORE_ROWS = (2, 32, 128, 256, 192)      # the other buckets of a build with default limits
BESIDE_ROWS = 128               # up to here a kernel is also timed beside its neighbour, as in a captured step
PER_MODULE = 24                 # kernels of a library: bounds the cost of one compiler run
HIDDEN = {"1b": 2048, "8b": 4096, "7b": 3584, "3b": 3072, "q3": 4096, "phi": 5120}
MORE_LINEARS = {"3b.qkv": (5120, 3072, False), "3b.o": (3072, 3072, False), "3b.gate_up": (16384, 3072, True),
                "3b.down": (3072, 8192, False), "q3.gate_up": (24576, 4096, True), "q3.down": (4096, 12288, False),
                "phi.qkv": (7680, 5120, False), "phi.o": (5120, 5120, False), "phi.gate_up": (35840, 5120, True),
                "phi.down": (5120, 17920, False)}     # Llama-3.2-3B, Qwen3-8B and Phi-4: shapes no rule was fitted to
HEADS = {"1b": (32, 8, 64), "8b": (32, 8, 128), "7b": (28, 4, 128)}
NORM_ROWS = {False: (1, 8, 64), True: (512, 4096)}      # few and many: a kernel each
NORM_BUCKET = 64
ATTENTION_CASES = {1: ((1, 512), (1, 2048), (1, 8192)), 8: ((1, 512), (1, 2048), (8, 512), (8, 2048)),
                   64: ((1, 512), (8, 2048), (64, 512), (64, 2048))}      # bucket → (sequences, tokens behind each)
FUSED_ROWS = (1, 8, 64)
FUSED_TOKENS = (512, 2048)
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
    layers: tuple[str, str] | None = None   # model and weight format of the decode step in whose layers it is judged

    @property
    def chain(self) -> str:
        return "decode_{} of {} in {}".format(self.bucket, *self.layers) if self.layers is not None else ""


PARTS = ("qkv", "o", "gate_up", "down")


def declared() -> list[Job]:
    """The set by which tuning is judged, fixed before anything is measured: the four matmuls of an 8B model in bfloat16 and
    q4_1 at every number of rows that the issue lists, norms, and decode attention, one by one and in one kernel."""
    found = [linear_job(f"8b.{part}", rows, weight) for weight in ("bf16", "q4_1") for rows in ROWS for part in PARTS]
    found += [norm_job("8b", residual, many) for residual in (True, False) for many in NORM_ROWS]
    found += [attention_job("8b", bucket) for bucket in ATTENTION_CASES]
    return found + [fused_job("8b", rows) for rows in FUSED_ROWS]


def jobs() -> list[Job]:
    """In the order in which they are tuned: what the issue asks for, then the other models, then what else a build with
    default limits has, then models whose shapes no rule knows."""
    parts = PARTS
    found = declared()
    found += [fused_job(model, rows) for model in ("8b", "1b", "7b") for rows in (1, 2, 4, 8, 16, 32, 64)
              if (model, rows) not in {("8b", rows) for rows in FUSED_ROWS}]
    found += [linear_job(f"{model}.{part}", rows) for rows in ROWS[:-1] for model in ("1b", "7b") for part in parts]
    found += [norm_job(model, residual, many) for many in NORM_ROWS for model in HIDDEN if model not in ("8b", "q3")
              for residual in (True, False)]
    found += [attention_job(model, bucket) for bucket in ATTENTION_CASES for model in ("1b", "7b")]
    found += [linear_job(f"{model}.{part}", rows) for rows in MORE_ROWS for model in ("8b", "1b", "7b") for part in parts]
    found += [linear_job(f"8b.{part}", rows, "q4_1") for rows in (2, 32, 128) for part in parts]
    found += [linear_job(f"8b.{part}", rows, weight) for weight in ("q8_0", "fp8") for rows in (1, 8, 16) for part in parts]
    found += [linear_job(part, rows) for rows in (1, 8, 32, 64, 512) for part in MORE_LINEARS]
    return found


def linear_spec(linear: str, rows: int, weight: str = "bf16") -> LinearSpec:
    """The question that a build for bfloat16 asks about this matrix."""
    n, k, swiglu = {**LINEARS, **MORE_LINEARS}[linear]
    out = "float32" if linear.endswith(".head") else "bfloat16"
    return LinearSpec(n, k, FORMATS[weight], "decode", "bfloat16", out, bias=linear == "7b.qkv",
                      glu="swiglu" if swiglu else None, max_rows=rows)


def linear_job(linear: str, rows: int, weight: str = "bf16") -> Job:
    """Where a build folds the norms into its matmuls, the kernel with the norm is measured, among those that can have it;
    else the plain one beside a norm."""
    spec, before = linear_spec(linear, rows, weight), linear.partition(".")[2] in ("qkv", "gate_up", "head")
    folded = replace(spec, norm_epsilon=1e-5) if before else replace(spec, residual=True, prepares_norm=True)
    folds = default_choice(spec)["family"].startswith(NORM_FAMILIES)   # what `folds_norm` asks, without making kernels
    spec = folded if folds else spec
    case = {"kind": "linear", "rows": rows, "n": spec.out_features, "k": spec.in_features, "weight": weight,
            "swiglu": spec.gated, "bias": spec.bias, "out_dtype": spec.out_dtype,
            "norm_epsilon": spec.norm_epsilon, "prepares_norm": spec.prepares_norm}
    hidden = HIDDEN[linear.partition(".")[0]]
    neighbour = NormSpec(hidden, 1e-5, "bfloat16", False) if rows <= BESIDE_ROWS and not folds else None
    name = f"{linear}@{rows}" if weight == "bf16" else f"{linear}.{weight}@{rows}"
    keeps = NORM_FAMILIES if folds else ""
    layers = (linear.partition(".")[0], weight) if rows <= BESIDE_ROWS and not linear.endswith(".head") else None
    return Job(name, "cuda.linear", spec, rows, [case], neighbour, before,
               only=lambda choice: _likely(choice, spec) and choice.get("family", "").startswith(keeps), layers=layers)


def _likely(choice: dict[str, Any], spec: LinearSpec) -> bool:
    """Whether a first sweep of whole spaces (789 candidates on the H200) had its like within 10 % of a best."""
    rows, family = spec.max_rows or 0, choice.get("family")
    if family == "gemm_few":
        if spec.weight.quantized and rows <= 64:
            return False
        spread = choice["split"] <= 4 or (choice["consumers"] == 2 and choice["split"] == 6)
        least = min(rows / 2 if rows >= 32 else rows, 64)
        return rows > 8 and choice["columns"] >= least and spread and (choice["share"] == 1 or rows > 64)
    if family == "gemm_rows":
        if choice.get("strips", 1) > 1 and choice["warps"] != 8:
            return False
        if rows > 8:       # its loads need the L1 cache, and gemm_few, which the others are, leaves it none in a step
            return False
        return choice["warps"] >= 8 or (choice["warps"] == 4 and choice["blocks_per_sm"] == 4)
    if family == "gemm_few_quant":
        return rows > 8 and choice["split"] == 8
    if family == "gemm_group_columns":
        return choice["unroll"] == choice["columns"] and choice["warps"] >= 7
    if rows == 1 and spec.weight.bits == 4:             # gemm_group_columns is far ahead
        return False
    if family == "gemm_few_bulk":
        warps = choice["warps"] * choice["groups"] * choice["blocks_per_sm"]
        # Of many weight rows and many rows of x few warps hold the sums of one wave.
        least = 7 if rows > 32 and choice["strips"] >= 2 else 10
        seldom = choice["groups"] in (4, 11, 15) or choice["split"] in (3, 6)
        return least <= warps <= 16 and choice["scaled"] == (rows > 32) and not (seldom and choice["feeders"] == 1)
    if rows > 8 and family in ("gemm_rows_quant", "gemm_rows_bulk") and spec.weight.bits == 4:      # gemm_few_bulk
        return False
    if family == "gemm_rows_bulk":
        return rows <= 16 and choice["unroll"] == 2 and choice["stages"] in (2, 4)
    if family == "gemm_mixed":
        return rows <= 128 and choice["blocks_per_sm"] == 1
    if family == "gemm_rows_quant":
        strips = choice.get("strips", 1)
        if rows > 8:                                    # beyond 16, gemm_few_bulk and gemm_mixed are far ahead
            good = {(8, 1), (8, 2), (16, 1)}
            return rows <= 16 and (choice["warps"], choice["unroll"]) in good and not choice.get("ahead")
        likely = {(8, 1)} if strips > 1 else {(8, 2), (16, 1), (16, 2)}
        return (choice["warps"], choice["unroll"]) in likely
    if family == "gemm_many":
        if spec.weight.quantized and (rows <= 64 or choice.get("cluster") == 2 or "group_m" in choice):
            return False
        return rows < 1024 or (bool(choice.get("skew")) and (choice["cluster"] == 1 or "group_m" not in choice))
    return choice.get("algorithm", 0) < (6 if rows >= 64 else 3)


def norm_job(model: str, residual: bool, many: bool = False) -> Job:
    spec = NormSpec(HIDDEN[model], 1e-5, "bfloat16", residual, many)
    cases = [{"kind": "norm", "rows": rows, "h": spec.hidden_size, "residual": residual} for rows in NORM_ROWS[many]]
    name = f"{model}.{'add_norm' if residual else 'norm'}{'_many' if many else ''}"
    if many:
        return Job(name, "cuda.norm", spec, NORM_ROWS[many][0], cases)
    # Of few rows no block takes several: it only fetches the weights before it waits for x.
    return Job(name, "cuda.norm", spec, NORM_BUCKET, cases, only=lambda choice: choice["blocks"] in (0, 264),
               layers=(model, "bf16") if residual else None)


def attention_job(model: str, bucket: int) -> Job:
    heads, kv_heads, dim = HEADS[model]
    spec = AttentionSpec(2, heads, kv_heads, dim, dim, 16, 512, 8192, "bfloat16", "bfloat16", dim ** -0.5)
    cases = [{"kind": "decode_attention", "rows": count, "tokens": tokens, "spec": asdict(spec)}
             for count, tokens in ATTENTION_CASES[bucket]]
    return Job(f"{model}.decode_attention@{bucket}", "cuda.decode_attention", spec, bucket, cases,
               only=lambda choice: _likely_split(choice, bucket))


def _likely_split(choice: dict[str, Any], bucket: int) -> bool:
    blocks = choice["blocks"]
    return blocks in (132, 264) and choice["stages"] <= 3 and choice["warps"] >= 4


def fused_job(model: str, rows: int) -> Job:
    heads, kv_heads, dim = HEADS[model]
    spec = AttentionSpec(2, heads, kv_heads, dim, dim, 16, 512, 8192, "bfloat16", "bfloat16", dim ** -0.5)
    cases = [{"kind": "fused_attention", "rows": rows, "tokens": tokens, "spec": asdict(spec)} for tokens in FUSED_TOKENS]
    return Job(f"{model}.fused_attention@{rows}", "cuda.rope_append_attention", FusedAttentionSpec(spec, rows), rows, cases,
               only=lambda choice: _likely_cluster(choice, rows), layers=(model, "bf16"))


def _likely_cluster(choice: dict[str, Any], rows: int) -> bool:
    """Four warps were best wherever they fit; beyond 8 rows nothing beside them needs the L1 cache."""
    return (choice["warps"] == 4 or (choice["warps"] == 2 and choice["key_tiles"] == 2)) and choice["stages"] >= 3 and (
        bool(choice["reserve"]) == (rows <= 8))


def candidates(job: Job) -> list[dict[str, Any]]:
    """The rule's choice first."""
    part = families_for(parse_target(TARGET))[job.family].part(job.spec, job.bucket)
    assert part is not None, job.name
    return [dict(part.space.default), *(choice for choice in part.space.all() if job.only(choice))]


Wanted = tuple[str, Any, dict[str, Any]]        # family, spec, choice; "unpack" for the first stage of an unpacked product


def prepare(folder: Path, chosen: Sequence[Job], cache: Path | None = None, processes: int = 1,
            per_module: int = PER_MODULE) -> None:
    """All candidates, compiled, and `INDEX`. `cache`: a folder of libraries of earlier calls; what has not changed is taken
    from there."""
    from relaxpack.fingerprint import compiler_fingerprint

    start = time.perf_counter()
    families = families_for(parse_target(TARGET))
    folder.mkdir(parents=True, exist_ok=True)
    chains = chains_of(chosen)
    rules: dict[str, dict[str, Any]] = {}               # what stands around a task's kernel in chains, by workload
    wanted: dict[str, Wanted] = {}
    tasks: list[dict[str, Any]] = []
    groups: list[list[str]] = []

    def want(one: Wanted) -> str:
        family, spec, choice = one
        if isinstance(spec, LinearSpec):
            spec = replace(spec, max_rows=None)         # one kernel for several row counts
        key = canonical([family, asdict(spec), choice])
        new.setdefault(str(choice.get("family", "")), {})[key] = one
        return key

    for job in chosen:
        new: dict[str, dict[str, Wanted]] = {}          # so that a change of one kernel leaves the libraries of the others
        found = [{"choice": choice, "kernel": want((job.family, job.spec, choice))} for choice in candidates(job)]
        workload = families[job.family].workload(job.spec, _label(job))
        task = {"name": job.name, "bucket": job.bucket, "cases": list(job.cases), "candidates": found,
                "workload": asdict(workload), "generation": GENERATIONS[kernels_of(workload)]}
        if job.beside is not None:
            task["beside"] = {"before": job.before, "h": job.beside.hidden_size,
                              "kernel": want(("cuda.norm", job.beside, {"dependent_launch": True}))}
        if isinstance(job.spec, LinearSpec) and job.spec.weight.quantized:
            task["unpack"] = {"kernel": want(("unpack", job.spec.without_norm(), {}))}
        if job.chain:
            work = (as_asked(job.family, job.spec) or families[job.family].workload(job.spec)).hash
            chain = chains.get(job.chain)
            if chain is None or work not in chain.works():
                raise CompileError(f"{job.name}: no such kernel in the layers of {job.chain}")
            task |= {"chain": job.chain, "work": work}
            for key, one in chain.works().items():
                if key not in rules:
                    rules[key] = {"kernel": want(_rule(families, one))}
            if isinstance(job.spec, FusedAttentionSpec):    # its cases are of another size than the layers' pages
                spec = replace(job.spec, attention=families[job.family].canonical(job.spec).attention)
                for one in found:
                    one["in_chain"] = {"kernel": want((job.family, spec, one["choice"]))}
        tasks.append(task)
        for group in new.values():
            keys = [key for key in group if key not in wanted]
            wanted |= group
            groups += [keys[first:first + per_module] for first in range(0, len(keys), per_module)]

    libraries: dict[str, str] = {}
    made: dict[str, dict[str, Any]] = {}
    for number, (library, entries) in enumerate(_compiled(groups, wanted, folder, cache, processes)):
        made |= entries
        libraries |= {stage["function"]: library for entry in entries.values() for stage in entry["stages"]}
        print(f"{number + 1}/{len(groups)} {library}: {len(made)} of {len(wanted)} kernels, "
              f"{time.perf_counter() - start:.0f} s", flush=True)
    for one in (*(one for task in tasks for one in _launched(task)), *rules.values()):
        one |= made[one.pop("kernel")]
    used = {task["chain"] for task in tasks if "chain" in task}
    index = {"tasks": tasks, "libraries": libraries, "compiler": dict(compiler_fingerprint("cuda")), "kernels": rules,
             "chains": {name: chain.to_json() for name, chain in chains.items() if name in used}}
    (folder / f"{INDEX}.xz").write_bytes(lzma.compress(json.dumps(index).encode(), preset=1))
    size = sum(path.stat().st_size for path in folder.iterdir())
    count = sum(len(task["candidates"]) for task in tasks)
    print(f"{len(tasks)} tasks, {count} candidates, {len(libraries)} kernels, {size / 1e6:.1f} MB, "
          f"{time.perf_counter() - start:.0f} s")


def _compiled(groups: Sequence[Sequence[str]], wanted: Mapping[str, Wanted], folder: Path, cache: Path | None,
              processes: int) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """What `compile_group` says of each, as they come."""
    pairs = [[(key, wanted[key]) for key in group] for group in groups if group]
    if processes == 1:
        yield from (compile_group(group, folder, cache) for group in pairs)
        return
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    workers = [Worker() for _ in range(processes)]
    for worker in workers:
        free.put(worker)

    def one(group: list[tuple[str, Wanted]]) -> tuple[str, dict[str, dict[str, Any]]]:
        worker = free.get()
        try:
            answer: tuple[str, dict[str, dict[str, Any]]] = worker.call("benchmarks.gpu.tune_tasks:compile_group", group,
                                                                        folder, cache, timeout=900)
            return answer
        finally:
            free.put(worker)

    try:
        with ThreadPoolExecutor(processes) as pool:
            for done in as_completed([pool.submit(one, group) for group in pairs]):
                yield done.result()
    finally:
        for worker in workers:
            worker.close()


def compile_group(group: Sequence[tuple[str, Wanted]], folder: Path,
                  cache: Path | None) -> tuple[str, dict[str, dict[str, Any]]]:
    """(name of the library in `folder` that has these kernels, how each is called)."""
    funcs: dict[str, Any] = {}
    entries: dict[str, dict[str, Any]] = {}
    for key, one in group:
        kernel = _kernel(one)
        entries[key] = described(kernel)
        for number, (stage, told) in enumerate(zip(kernel.stages, entries[key]["stages"], strict=True)):
            told["function"] = "k_" + hashlib.sha256(canonical([key, number]).encode()).hexdigest()[:12]
            funcs[told["function"]] = stage.func
    return _library(funcs, folder, cache), entries


def _kernel(one: Wanted) -> Kernel:
    family, spec, choice = one
    if family != "unpack":
        kernel: Kernel = families_for(parse_target(TARGET))[family].make(spec, choice)
        return kernel
    from relaxpack.schedules.kernels.cuda.linear import unpacked

    return replace(unpacked(spec, True), stages=unpacked(spec, True).stages[:1], temporaries={})


def _library(part: dict[str, Any], folder: Path, cache: Path | None) -> str:
    import relaxpack.tvm_setup  # noqa: F401
    import tvm
    from relaxpack.schedules.cuda_compile import compile_module

    texts = "".join(f"{name} {func.script()}" for name, func in part.items())
    name = f"tune-{hashlib.sha256(texts.encode()).hexdigest()[:16]}.so"
    packed, kept = folder / f"{name}.xz", cache / f"{name}.xz" if cache is not None else None
    if kept is not None and kept.exists():
        packed.write_bytes(kept.read_bytes())
        return name
    module = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in part.items()})
    compile_module(module, parse_target(TARGET)).export_library(str(folder / name))
    packed.write_bytes(lzma.compress((folder / name).read_bytes(), preset=6))
    (folder / name).unlink()
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(packed.read_bytes())
    return name


def chains_of(chosen: Sequence[Job]) -> dict[str, Chain]:
    """By name, those in which these jobs are judged. A model is lowered once for each weight format."""
    from benchmarks.gpu.tune_layers import layer_chains

    rows: dict[tuple[str, str], dict[int, str]] = {}
    for job in chosen:
        if job.layers is not None:
            rows.setdefault(job.layers, {})[job.bucket] = job.chain
    found = {}
    for (model, weight), names in rows.items():
        start = time.perf_counter()
        made = layer_chains(model, weight, names, parse_target(TARGET))
        found |= {names[count]: chain for count, chain in made.items()}
        print(f"layers of {model} in {weight}: {len(made)} chains, {time.perf_counter() - start:.0f} s", flush=True)
    return found


def _rule(families: Mapping[str, KernelFamily], work: Workload) -> Wanted:
    """The rule's kernel, in the words of a task's first candidate where it is one."""
    name, spec = family_and_spec(work)
    part = families[name].part(spec, getattr(spec, "max_rows", None) or 1)
    return name, spec, dict(part.space.default) if part is not None else {}


def _launched(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from task["candidates"]
    yield from (one["in_chain"] for one in task["candidates"] if "in_chain" in one)
    yield from (task[name] for name in ("beside", "unpack") if name in task)


def _label(job: Job) -> str:
    spec = job.spec
    if isinstance(spec, LinearSpec):
        return f"linear_{spec.out_features}x{spec.in_features}"
    if isinstance(spec, FusedAttentionSpec):
        return "rope_append_attention"
    return f"norm_{spec.hidden_size}" if isinstance(spec, NormSpec) else "decode_attention"
