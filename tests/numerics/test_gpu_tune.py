"""Tuning on a GPU machine, played through without one: candidates are checked and timed in turn by `tune_device`, with
kernels written in torch; what comes out becomes records, the rule's where nothing is faster.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.gpu import tune_cases, tune_device, tune_seed, tune_tasks
from benchmarks.gpu.tune_decisions import decided
from benchmarks.gpu.tune_records import condensed, joined, own_kernels, records, rows, table, weak_gain
from benchmarks.gpu.tune_seed import refresh
from relaxpack.dist.tuning.exchange import pull, push
from relaxpack.errors import DatabaseError
from relaxpack.kernel_generations import GENERATIONS
from relaxpack.kernel_spec import AttentionSpec
from relaxpack.schedules.kernels.cuda.provider import CudaKernels
from relaxpack.schedules.tuning.tuned import TunedKernels
from relaxpack.target import parse_target
from relaxpack.tuning.candidates import families_for, family_for
from relaxpack.tuning.chain import CHAIN_ROUNDS, Chain
from tests.helpers import attention_device, bench_stand_in, tuning_records
from tests.helpers.bench_stand_in import StandIn
from tests.helpers.tuning_records import SM_90

COMPILER = {"apache-tvm": "0.27.0.post1", "kernels": 1, "cuda": "13.0"}
HOPPER = parse_target("cuda:sm_90a")
JOB = replace(tune_tasks.linear_job("8b.o", 16), cases=[
    {"kind": "linear", "rows": 4, "n": 64, "k": 128, "weight": "bf16", "swiglu": False, "bias": False,
     "out_dtype": "bfloat16"}])


def _stage(function: str, *arguments: str) -> dict[str, Any]:
    return {"stages": [{"function": function, "arguments": list(arguments)}], "temporaries": {}}


def _task(beside: bool = True, bucket: int = 16) -> dict[str, Any]:
    """8b.o at 16 rows with the true choices, on a small matrix; function k3 is that of choice 3."""
    choices = tune_tasks.candidates(JOB)[:8]
    workload = families_for(HOPPER)["cuda.linear"].workload(JOB.spec, "linear_4096x4096")
    return {"name": JOB.name, "bucket": bucket, "generation": 1, "cases": list(JOB.cases), "workload": asdict(workload),
            "candidates": [{"choice": choice, **_stage(f"k{i}", "x", "weight", "y")} for i, choice in enumerate(choices)],
            **({"beside": {"before": False, "h": 64, **_stage("norm", "x", "weight", "y")}} if beside else {})}


def _measured(times: dict[str, float], task: dict[str, Any] | None = None, broken: Any = (),
              **kernels: Any) -> dict[str, Any]:
    functions = {f"k{i}": bench_stand_in.linear for i in range(8)} | {"norm": bench_stand_in.norm} | kernels
    bench = StandIn(functions, {"norm": 2.0, **times})
    session = tune_device.Session(bench, dict.fromkeys(functions, "library"), broken=broken)
    return {**session.measure(task or _task()), "seconds": 0.5}


def _in_layers(measured: dict[str, Any], **layers: float) -> dict[str, Any]:
    """The same task judged in a chain: microseconds of a layer by candidate."""
    for number, us in {"k0": 500.0, **layers}.items():
        measured["candidates"][int(number[1:])]["chain_us"] = _times(us)
    return measured | {"chain": "decode_16", "work": "o", "calls": 1, "twin_chain_us": _times(500.0)}


def _times(us: float) -> list[float]:
    return [us * (1 + 0.0005 * (i % 3)) for i in range(CHAIN_ROUNDS)]


def _together(us: float = 470.0, **winners: int) -> dict[str, Any]:
    return {"decode_16": {"winners": {JOB.name: winners["number"]}, "rule_us": _times(500.0), "twin_us": _times(500.0),
                          "winners_us": _times(us)}}


def _result(*tasks: dict[str, Any]) -> dict[str, Any]:
    return {"target": dict(SM_90), "host": "gpu", "created": "2026-11-29T20:15:00Z", "compiler": COMPILER, "torch": "2.11",
            "ceilings": {"read_tb_s": 4.2, "gemm_tflop_s": 780.0}, "tasks": list(tasks)}


def test_the_fastest_right_kernel_becomes_a_record_that_a_build_uses() -> None:
    task = _measured({"k3": 70.0, "k5": 40.0, "k6": 30.0}, k5=bench_stand_in.wrong, broken=[(JOB.name, 6)])
    assert task["candidates"][5]["error"] == float("inf") and task["candidates"][6]["failure"] == "ended the process"
    task = _in_layers(task, k1=501.0, k3=470.0)
    (one,), problems = records(_result(task) | {"together": _together(number=3)})
    choice = task["candidates"][3]["choice"]
    assert one.choice == {"kind": "parameters", "parameters": choice} and one.bucket == 16 and problems == []
    assert one.median_us == pytest.approx(72, rel=0.01) and one.baseline_us == pytest.approx(102, rel=0.01)
    assert dict(one.target) == dict(SM_90) and dict(one.compiler) == COMPILER and "beside" in one.conditions
    assert "500.250 us a layer by the rule, 470.235 with this" in str(one.conditions["chain"])

    class Found:
        def find(self, workload: Any, buckets: Any, kernel: str) -> Any:
            return one if workload.text == one.workload.text and one.bucket in buckets else None

        def use(self, record: Any, kernel: str) -> None:
            pass

        def reject(self, record: Any, kernel: str, reason: str) -> None:
            raise AssertionError(reason)

    known = families_for(HOPPER)
    tuned = TunedKernels(Found(), lambda operation, spec: family_for(known, operation, spec), {"decode": 64, "prefill": 512})
    kernel = CudaKernels(HOPPER, tuned=tuned).linear(JOB.spec)
    assert kernel.source == f"tuned:{one.id[:16]}"
    assert kernel.stages[0].name == known["cuda.linear"].make(JOB.spec, choice).stages[0].name


def test_the_time_beside_the_neighbour_decides() -> None:
    """A kernel that is fast alone and lets its neighbour wait is not taken."""
    def keeps_the_chip(self: StandIn, calls: Any) -> Any:
        replay = plain(self, calls)
        return (lambda: replay() + 80) if self.called == ["k3", "norm"] else replay

    plain = StandIn.captured
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StandIn, "captured", keeps_the_chip)
        task = _measured({"k3": 60.0, "k4": 80.0})
    decision = decided(task)
    assert not isinstance(decision, str) and decision.winner["number"] == 4


def test_a_decode_kernel_that_is_fast_by_itself_alone_is_left_out() -> None:
    """The time of a layer decides, and that of a layer with all winners."""
    alone = _measured({"k3": 50.0})
    slower = _in_layers(_measured({"k3": 50.0}), k3=503.0)
    better = _in_layers(_measured({"k3": 50.0}), k3=490.0)
    for task, together, why in (
            (alone, {}, "by itself: whole decode steps"), (slower, {}, None), (better, {}, "not timed together"),
            (better, _together(number=2), "not timed together"), (better, _together(499.0, number=3), "not 0.3% faster"),
            (better, {"decode_16": {"winners": {JOB.name: 3}, "failure": "illegal"}}, "all winners together: illegal")):
        result = _result(task) | {"together": together}
        (one,), problems = records(result)
        assert one.choice["parameters"] == {} and problems == []
        assert why in str(one.conditions["left_out"]) if why else "left_out" not in one.conditions
        assert one.median_us == pytest.approx(one.baseline_us)            # the rule's own, not its twin's in a layer
        assert [row["improved"] for row in rows(result)] == [False] and rows(result)[0]["gain"] == 1.0
    kept = condensed(_result(better) | {"together": _together(number=3), "cublaslt": "13.1"})
    assert kept["together"]["decode_16"] == {"winners": {JOB.name: 3}, "decision": "faster by 6.0%", "ratio": 0.94}
    assert kept["rows"][0]["gain"] == pytest.approx(102 / 92, rel=0.01) and kept["rows"][0]["layer_us"] == (
        pytest.approx(500.25), pytest.approx(490.245))


def _of_today(result: dict[str, Any]) -> dict[str, Any]:
    return result | {"tasks": [task | {"generation": GENERATIONS["cuda.linear"]} for task in result["tasks"]]}


def test_several_results_are_one() -> None:
    """The last one that has a task of today's kernels counts; chains of tasks that are gone go too."""
    first = _of_today(_result(_in_layers(_measured({"k3": 50.0}), k3=490.0))) | {"together": _together(number=3)}
    other = _of_today(_result(_measured({"k3": 70.0})))
    other["tasks"][0]["name"] = "other"
    ceilings = {"read_tb_s": 4.3, "gemm_tflop_s": 770.0}
    made = joined([first, other | {"ceilings": ceilings}])
    assert [task["name"] for task in made["tasks"]] == [JOB.name, "other"] and made["together"] == first["together"]
    assert made["ceilings"] == {"read_tb_s": 4.3, "gemm_tflop_s": 780.0}
    again = joined([first, _of_today(_result(_measured({"k3": 70.0})))])
    assert "chain" not in again["tasks"][0] and again["together"] == {}
    assert [task["name"] for task in joined([other, _result(_measured({}))])["tasks"]] == ["other"]      # generation 1


def test_a_run_goes_into_the_seed(tmp_path: Path) -> None:
    """The other targets' bundle keeps its bytes; what is new replaces the old, what is of older kernels goes."""
    seed = tmp_path / "seed"
    cpu = tuning_records.record("cpu")
    (old,), _ = records(_of_today(_result(_measured({"k3": 70.0}))))
    left = replace(old, compiler={**old.compiler, "kernels": GENERATIONS["cuda.linear"] - 1}, bucket=8)
    kept = replace(old, bucket=4)
    bundle = Path(str(push([cpu], str(seed)).bundle))
    push([old, left, kept], str(seed))
    result = _of_today(_result(_in_layers(_measured({"k3": 70.0}), k3=470.0))) | {"together": _together(number=3)}
    before = bundle.read_bytes()
    lines = refresh(seed, [result, _result(_measured({"k3": 1.0}))])
    assert bundle.read_bytes() == before and len(list(seed.glob("*.jsonl"))) == 2 and list(tmp_path.iterdir()) == [seed]
    assert lines == ["linear_4096x4096, 16 rows: of kernels before today's",
                     "2 records of CUDA, 1 of them other than the rule; 1 of other targets"]
    (new,), _ = records(result)
    assert {record.id for record in pull(str(seed)).records} == {cpu.id, kept.id, new.id}
    assert refresh(seed, [result])[-1] == lines[-1]                                # once more: the same


def test_a_seed_keeps_what_is_no_bundle_and_what_is_damaged(tmp_path: Path) -> None:
    cpu = tuning_records.record("cpu")
    bundle = Path(str(push([cpu, tuning_records.record("other")], str(tmp_path)).bundle))
    (tmp_path / "notes.txt").write_text("mine")
    refresh(tmp_path, [_of_today(_result(_measured({"k3": 70.0})))])
    assert (tmp_path / "notes.txt").read_text() == "mine" and len(list(tmp_path.glob("*.jsonl"))) == 2
    bundle.write_bytes(bundle.read_bytes().replace(b"machine-a", b"machine-b", 1))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DatabaseError, match="damaged records, which would be lost"):
        refresh(tmp_path, [_result(_measured({"k3": 1.0}))])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("text, says", [(None, "No such file"), ("{", "cannot be read"), ("[]", "no result of tune.py"),
                                        ('{"tasks": []}', "no bundles of tuning records")])
def test_results_and_seeds_that_are_none(tmp_path: Path, text: str | None, says: str,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "result.json"
    if text is not None:
        result.write_text(text)
    monkeypatch.setattr("sys.argv", ["tune_seed", str(result), "--seed", str(tmp_path / "seed")])
    with pytest.raises(SystemExit, match=says):
        tune_seed.main()


def test_without_a_time_in_layers_the_rule_stands() -> None:
    task = _measured({"k3": 50.0}) | {"chain": "decode_16", "work": "o", "chain_failure": "TuningError: no numbers"}
    decision = decided(task)
    assert not isinstance(decision, str) and not decision.improved and "TuningError: no numbers" in decision.verdict.why
    (one,), _ = records(_result(task))
    assert one.choice["parameters"] == {} and one.median_us == pytest.approx(102, rel=0.01)


def test_a_library_may_win() -> None:
    task = _task(bucket=512)
    task["candidates"][2]["choice"] = {"library": "cublaslt"}
    (one,), _ = records(_result(_measured({"k2": 50.0}, task)))
    assert one.choice == {"kind": "library", "library": "cublaslt", "parameters": {}}
    (other,), _ = records(own_kernels(_result(_measured({"k2": 50.0, "k4": 80.0}, task))))
    assert other.choice == {"kind": "parameters", "parameters": task["candidates"][4]["choice"]}


def test_within_the_noise_the_rule_stands() -> None:
    (one,), _ = records(_result(_measured({"k3": 99.5}, _task(beside=False))))
    assert one.choice == {"kind": "parameters", "parameters": {}} and one.baseline_us == pytest.approx(100, rel=0.01)


def test_a_gain_on_the_whole_excuses_no_loss_on_a_case() -> None:
    """Two cases; candidate 3 halves one and is slower on the other."""
    task = _task(beside=False)
    task["cases"] = [task["cases"][0], {**task["cases"][0], "rows": 8}]
    measured = _measured({"k3": 50.0, "k4": 90.0}, task)
    measured["candidates"][3]["alone_us"][1] = [110.0] * tune_device.DUEL_ROUNDS
    decision = decided(measured)
    assert not isinstance(decision, str) and decision.winner["number"] == 4


def test_without_the_rule_there_is_nothing_to_compare_with() -> None:
    def raises(*arguments: Any) -> None:
        raise ValueError("no such kernel image")

    kept, (problem,) = records(_result(_measured({"k3": 50.0}, k0=raises)))
    assert kept == [] and "the rule's kernel failed (ValueError: no such kernel image)" in problem


def test_a_broken_context_ends_the_process() -> None:
    def raises(*arguments: Any) -> None:
        raise RuntimeError("CUDA: an illegal memory access was encountered")

    with pytest.raises(RuntimeError):
        _measured({}, k1=raises)


def test_the_table_says_how_far_the_rule_is_from_the_roofline() -> None:
    result = _result(_measured({"k3": 50.0}, _task(bucket=512)), _measured({}, _task(beside=False)))
    first, second = rows(result)
    assert first["gain"] == pytest.approx(102 / 52, rel=0.01) and second["gain"] == 1.0
    assert first["share"] == pytest.approx(first["roofline_us"] / 100, rel=0.01)
    gain, count = weak_gain([first, second])
    assert count == 2 and gain == pytest.approx((102 / 52) ** 0.5, rel=0.01)
    kept = condensed({**result, "cublaslt": "13.1"})
    assert [row["gain"] for row in kept["rows"]] == [pytest.approx(first["gain"], abs=1e-3), 1.0]
    assert kept["tasks"][JOB.name]["timed"] == 8 and kept["below_80_percent"]["cases"] == 2
    assert "| matmul bf16, 16 to 64 rows | 2 | 1 | 1.96x | 2 | 1.40x |" in table(result)
    assert "the rule |" in table(result) and "2 cases below 80 % of the roofline" in table(result)


@pytest.mark.parametrize("weight", ["q4_0", "q4_1", "q4_128", "q8_0", "fp8"])
def test_quantised_weights_are_exact_in_bfloat16(weight: str) -> None:
    """What the reference takes for the weight is what the packed buffers hold."""
    from relaxpack.weight_format import FORMATS

    fmt, unpacked = FORMATS[weight], []
    given = {**JOB.cases[0], "weight": weight, "swiglu": True}

    def unpack(buffers: dict[str, Any]) -> None:
        unpacked.append({name: tensor for name, tensor in buffers.items() if name != "plain"})
        buffers["plain"].zero_()

    case = tune_cases.LinearCase(StandIn({}, {}), given, unpack)
    assert set(unpacked[0]) <= set(case.sets[0]) and case.reference()["y"].shape == (4, 32)
    scales = case.sets[0]["weight.scales"]
    if fmt.zeros:
        words = scales.view(torch.int32)
        assert bool((words >> 16 == 8).all())
        scales = (words & 0xFFFF).short().view(torch.float16)
    scales = scales.float()
    assert torch.equal(scales.log2().round(), scales.log2()) and case.read_bytes < 64 * 128 * 2
    codes = case.sets[0]["weight.codes"].view(torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float() if fmt.e4m3 else codes & 15 if fmt.bits == 4 else codes.view(torch.int8)
    numbers = values.double() * float(scales.max()) - (2.0 ** -5 if fmt.minimum == "stored" else 0)
    assert bool(numbers.isfinite().all()) and torch.equal(numbers.bfloat16().double(), numbers)


def test_norms_inside_of_matmuls() -> None:
    """One prepares a norm, the other applies it: together they are the norm between two matmuls."""
    first = tune_cases.LinearCase(StandIn({}, {}), {**JOB.cases[0], "prepares_norm": True})
    found = first.reference()
    y = found["y"]
    np.testing.assert_allclose(found["squares"].sum(-1), y.square().sum(-1))
    second = tune_cases.LinearCase(StandIn({}, {}), {**JOB.cases[0], "k": 64, "norm_epsilon": 1e-5})
    second.sets[0]["x"], second.sets[0]["squares"] = found["scaled"], found["squares"]
    normed = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * first.sets[0]["norm_weight"].double()
    expected = normed @ second.plain.double().T
    np.testing.assert_allclose(second.reference()["y"], expected, rtol=1e-9)


@pytest.mark.parametrize("residual", [False, True])
def test_the_norms_case(residual: bool) -> None:
    case = tune_cases.NormCase(StandIn({}, {}), {"kind": "norm", "rows": 3, "h": 64, "residual": residual})

    def kernel(one: dict[str, Any]) -> None:
        total = one["x"] + one["residual"] if residual else one["x"]
        if residual:
            one["total"].copy_(total)
        bench_stand_in.norm(total, one["weight"], one["y"])

    case.poison()
    assert case.errors(case.reference()) == float("inf")
    kernel(case.sets[0])
    assert case.errors(case.reference()) < case.tolerance
    assert float((case.peer()[0]() - case.sets[0]["y"]).abs().max()) < 0.05


def test_attention_runs_on_pages_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_device, "DEVICE", "cpu")
    monkeypatch.setattr(tune_cases, "ATTENTION_BYTES", 1 << 16)
    spec = AttentionSpec(2, 4, 2, 64, 64, 16, 512, 8192, "bfloat16", "bfloat16", 0.125)
    given = {"kind": "decode_attention", "rows": 2, "tokens": 40, "spec": asdict(spec)}
    expected: list[Any] = []

    def split(q: Any, layer: int, pages: Any, table: Any, lengths: Any, y: Any, partial: Any, cuts: Any) -> None:
        assert pages.shape[0] == 2 and 0 <= layer < 2 and table.shape == (2, 512) and lengths.tolist() == [40, 40]
        assert bool(partial.isnan().all()) and cuts.dtype == torch.int32
        y.copy_(expected[0])

    bench = StandIn({"split": split}, {})
    expected.append(tune_cases.DecodeAttentionCase(bench, given).reference()["y"])
    candidate = {"choice": {}, **_stage("split", "q", "layer", "pages", "page_table", "lengths", "y", "partial", "cuts"),
                 "temporaries": {"partial": [["t", 3], "float32"], "cuts": [[4], "int32"]}}
    task = {"name": "attention", "bucket": 2, "workload": {}, "cases": [given], "candidates": [candidate]}
    measured = tune_device.Session(bench, {"split": "library"}).measure(task)
    entry, = measured["candidates"]
    assert entry["error"] < 1 and len(entry["alone_us"][0]) == tune_device.DUEL_ROUNDS and "torch_us" in measured


# ---- the watching process ----

@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`tune.py` in a folder of its own, beside a device module whose file is pretended to be there."""
    monkeypatch.setattr(tune_device, "__file__", str(tmp_path / "tune_device.py"))
    yield tmp_path / "tune.py"


def test_a_candidate_that_ends_the_process_is_skipped_by_the_next(child: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    child.write_text("import json, os, sys\n"
                     "broken = json.loads(sys.argv[sys.argv.index('--broken') + 1])\n"
                     f"open({str(out.with_suffix('.progress'))!r}, 'w').write(json.dumps(['8b.o@1', 7]))\n"
                     "if not broken: os.abort()\n"
                     f"open({str(out)!r}, 'w').write(json.dumps(broken))\n")
    assert tune_device.run(tmp_path, out, 120) == 0
    assert json.loads(out.read_text()) == [["8b.o@1", 7]]


def test_a_process_that_cannot_start_is_not_started_again(child: Path, tmp_path: Path) -> None:
    child.write_text("import sys; open(sys.argv[0] + '.starts', 'a').write('x'); sys.exit(3)")
    assert tune_device.run(tmp_path, tmp_path / "result.json", 120) == 1
    assert Path(f"{child}.starts").read_text() == "x"


def test_a_hanging_process_is_killed(child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_device, "HANG_SECONDS", 1.0)
    out = tmp_path / "result.json"
    child.write_text("import json, sys, time\n"
                     f"open({str(out.with_suffix('.progress'))!r}, 'w').write(json.dumps(['8b.o@1', 7]))\n"
                     "if '7' not in sys.argv[sys.argv.index('--broken') + 1]: time.sleep(600)\n")
    assert tune_device.run(tmp_path, out, 120) == 0


# ---- what is prepared ----

def test_every_job_has_the_rules_choice_first_and_others() -> None:
    jobs = tune_tasks.jobs()
    assert len({job.name for job in jobs}) == len(jobs)
    for spec, folds in ((jobs[0].spec, True), (tune_tasks.linear_job("8b.down", 8, "q4_1").spec, True), (JOB.spec, False)):
        assert (spec.prepares_norm or spec.norm_epsilon is not None) == folds
        assert CudaKernels(HOPPER).folds_norm(spec if folds else replace(spec, norm_epsilon=1e-5)) == folds
    for job in jobs:
        found = tune_tasks.candidates(job)
        assert len(found) >= 2, job.name
    named = {job.name for job in jobs}
    for count in (1, 4, 8, 16, 64, 512, 4096):
        assert {f"8b.{part}@{count}" for part in ("qkv", "o", "gate_up", "down")} <= named


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "many"), [(1, True), (2, False)])
def test_prepared_libraries_hold_every_function_of_the_index(tmp_path: Path, processes: int, many: bool) -> None:
    """Of the candidates and, where a job is judged in layers, of what else is in these."""
    import lzma

    if sys.platform != "linux" or not _can_compile():
        pytest.skip("no CUDA compiler")
    job = tune_tasks.norm_job("1b", True, many)
    job = replace(job, only=lambda choice: choice["threads"] >= 256 and not choice["blocks"])
    tune_tasks.prepare(tmp_path, [job], processes=processes, per_module=2)
    index = json.loads(lzma.decompress((tmp_path / "tune.json.xz").read_bytes()))
    task, = index["tasks"]
    functions = {stage["function"] for one in task["candidates"] for stage in one["stages"]}
    around = {stage["function"] for one in index["kernels"].values() for stage in one["stages"]}
    assert functions | around == set(index["libraries"]) and len(functions) == len(task["candidates"])
    if many:
        assert around == set() == set(index["chains"]) and len(set(index["libraries"].values())) == -(-len(functions) // 2)
    else:
        chain = Chain.from_json(index["chains"][task["chain"]])
        assert set(chain.works()) == set(index["kernels"]) and chain.calls_of(task["work"]) == 2 and chain.layers == 4
    for library in set(index["libraries"].values()):
        assert lzma.decompress((tmp_path / f"{library}.xz").read_bytes()).startswith(b"\x7fELF")


def _can_compile() -> bool:
    from tests.helpers.cuda_harness import can_generate, have_compiler

    return have_compiler() and can_generate()
