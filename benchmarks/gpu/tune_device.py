"""The GPU machine's half of tuning: checks every candidate against float64 and times those that are right, in turn. Needs
TVM's runtime and torch, no compiler.

One process works through the tasks and writes its results after each. The one that started it watches: a candidate that
hangs or breaks the GPU's context is noted and skipped by the next process.
"""

from __future__ import annotations

import json
import lzma
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.matmul_bench import Bench
from benchmarks.gpu.tune_cases import CASES, Buffers, Case
from benchmarks.gpu.tune_chains import Chains, fatal
from benchmarks.gpu.tune_decisions import decided, geometric_mean
from relaxpack.tuning.chain import CHAIN_FINALISTS

INDEX = "tune.json"
SCREEN_ROUNDS, DUEL_ROUNDS, FINALISTS = 3, 15, 4
CALLS = 40                  # of a graph at least, where they are short: starting it is no part of a call's time
LONG_US = 150.0             # from here on once over the sets is enough
HANG_SECONDS, START_SECONDS = 25.0, 90.0
Launch = Callable[[Buffers], None]


# --- the watching process ---------------------------------------------------------------------------------------------

def run(folder: Path, out: Path, limit: float, only: Sequence[str] = ()) -> int:
    """Runs `work` in child processes until it is done or the time is over. Needs neither torch nor TVM."""
    progress, end = out.with_suffix(".progress"), time.monotonic() + limit
    broken: list[list[Any]] = []
    while time.monotonic() < end:
        progress.write_text(json.dumps(["start", -1]))
        command = [sys.executable, str(Path(__file__).with_name("tune.py")), "work", str(folder), "--out", str(out),
                   "--limit", str(end - time.monotonic()), "--broken", json.dumps(broken), "--only", *only]
        child = subprocess.Popen(command)
        if wait(child, progress, end + 15):
            return 0
        at = json.loads(progress.read_text())
        print(f"the process ended at {at} ({child.returncode})", flush=True)
        if at[1] < 0 or len(broken) >= 8:
            return 1
        broken.append(at)
    return 0


def wait(child: subprocess.Popen[bytes], progress: Path, end: float) -> bool:
    """Whether it ended well. Kills it at `end`, or when nothing has moved for long."""
    seen, since = "", time.monotonic()
    while True:
        try:
            return child.wait(0.5) == 0
        except subprocess.TimeoutExpired:
            now, text = time.monotonic(), progress.read_text()
            if text != seen:
                seen, since = text, now
            patience = START_SECONDS if '"start"' in text else HANG_SECONDS
            if now > end or now - since > patience:
                child.kill()
                child.wait()


# --- the working process ----------------------------------------------------------------------------------------------

def work(folder: Path, out: Path, limit: float, broken: Sequence[Sequence[Any]] = (), only: Sequence[str] = ()) -> None:
    from relaxpack.fingerprint import target_fingerprint
    from relaxpack.target import parse_target

    end = time.monotonic() + limit
    index = json.loads(lzma.decompress((folder / f"{INDEX}.xz").read_bytes()))
    result: dict[str, Any] = {"tasks": []}
    if out.exists():
        result = json.loads(out.read_text())
    done = {task["name"] for task in result["tasks"]}
    bench = make_bench()
    result |= {"target": dict(target_fingerprint(parse_target("cuda:sm_90a"))), "host": platform.node(),
               "compiler": index["compiler"], "torch": bench.torch.__version__,
               "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cublaslt": cublaslt(bench)}
    if "ceilings" not in result:
        result["ceilings"] = bench.ceilings()
    bench.known_ceilings = result["ceilings"]
    session = Session(bench, index["libraries"], out.with_suffix(".progress"), broken, folder, index)
    left_out = []
    for task in index["tasks"]:
        if task["name"] in done or (only and not any(part in task["name"] for part in only)):
            continue
        if time.monotonic() > end:
            left_out.append(task["name"])
            continue
        start = time.monotonic()
        result["tasks"].append(session.measure(task))
        result["tasks"][-1]["seconds"] = round(time.monotonic() - start, 2)
        result["left_out"] = left_out
        write(out, result)
        print(summary(result["tasks"][-1]), flush=True)
    result["left_out"] = left_out
    result["together"] = session.together(index["tasks"], result["tasks"], end)
    write(out, result)


def write(out: Path, result: dict[str, Any]) -> None:
    draft = out.with_suffix(".draft")
    draft.write_text(json.dumps(result))
    draft.replace(out)


def make_bench() -> Any:
    bench = Bench(Path(tempfile.mkdtemp(prefix="tune-")))
    bench.lead_in = True         # whatever else the host does, compiling for one
    return bench


def open_gpu() -> Any:
    """For chains: without torch."""
    from relaxpack.tuning.cuda_device import Gpu

    return Gpu()


def cublaslt(bench: Any) -> str:
    """The library's version. Without it, its candidates fail one by one, each with the reason."""
    try:
        from relaxpack.runtime.library.cublaslt import load_library, register, version

        register(bench.tvm.cuda(0))
        return version(load_library())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Session:
    """`broken`: [task, candidate] that ended a process before this one. `packed`: where the compressed libraries are.
    `index`: has the chains of layers, where tasks are judged in some."""

    def __init__(self, bench: Any, libraries: dict[str, str], progress: Path | None = None,
                 broken: Sequence[Sequence[Any]] = (), packed: Path | None = None,
                 index: Mapping[str, Any] | None = None) -> None:
        self.bench, self.libraries, self.progress, self.packed = bench, libraries, progress, packed
        self.broken = frozenset((str(task), int(candidate)) for task, candidate in broken)
        index = index or {"chains": {}, "kernels": {}}
        self.chains = Chains(index["chains"], index["kernels"], open_gpu, self._function, self._note, self.broken)

    def measure(self, task: dict[str, Any]) -> dict[str, Any]:
        """Errors of all candidates, times of the best and of the rule, twice, beside torch."""
        self._at(task, -1)
        unpack = partial(self._launch, self._stages(task["unpack"]), {}) if "unpack" in task else None
        cases = [CASES[given["kind"]](self.bench, given, unpack) for given in task["cases"]]
        expected = [case.reference() for case in cases]
        entries = []
        for number, candidate in enumerate(task["candidates"]):
            entry: dict[str, Any] = {"choice": candidate["choice"], "number": number}
            entries.append(entry)
            if (task["name"], number) in self.broken:
                entry["failure"] = "ended the process"
                continue
            self._at(task, number)
            try:
                entry["error"] = max(self._check(self._launcher(candidate, case), case, want)
                                     for case, want in zip(cases, expected, strict=True))
                self.bench.synchronize()
            except Exception as error:   # one broken kernel must not hide the others
                entry["failure"] = f"{type(error).__name__}: {error}"[:300]
                if fatal(error):
                    raise
        del expected
        right = [entry for entry in entries if entry.get("error", 1.0) < 1.0]
        timed = self._timed(task, cases, right)
        return {"name": task["name"], "bucket": task["bucket"], "workload": task["workload"], "cases": [
            {key: value for key, value in case.given.items() if key != "spec"} | {
                "read_bytes": case.read_bytes, "flops": case.flops, "rotated_bytes": case.rotated_bytes} for case in cases],
                "candidates": entries, **{key: task[key] for key in ("chain", "work", "generation") if key in task}, **timed}

    def _timed(self, task: dict[str, Any], cases: Sequence[Case], right: list[dict[str, Any]]) -> dict[str, Any]:
        """Screening, then the duel. Kernels are captured alone, and where a neighbour is known, beside it."""
        tracks: dict[Any, list[Any]] = {}

        def captured(key: Any, calls: Callable[[Case], list[Any]]) -> None:
            graphs = []
            for case in cases:
                alone = calls(case)
                graphs.append((self._replay(case, alone), self._beside(task, case, alone)))
            tracks[key] = graphs

        for entry in right:
            self._at(task, entry["number"])
            candidate = task["candidates"][entry["number"]]
            captured(entry["number"], lambda case, candidate=candidate: self._calls(candidate, case))
        screened = self._rounds(tracks, SCREEN_ROUNDS)
        for entry in right:
            entry["screen_us"] = [median(beside or alone) for alone, beside in screened[entry["number"]]]
        others = sorted((entry for entry in right if entry["number"]), key=lambda entry: geometric_mean(entry["screen_us"]))
        count = CHAIN_FINALISTS if "chain" in task else FINALISTS
        kept = [entry for entry in right if not entry["number"]] + others[:count]
        tracks = {entry["number"]: tracks[entry["number"]] for entry in kept}
        self._at(task, -1)
        if kept and not kept[0]["number"]:
            captured("twin", lambda case: self._calls(task["candidates"][0], case))
        peers: dict[str, Any] = {}
        try:
            captured("torch", lambda case: case.peer())
        except RuntimeError as error:
            peers["torch_failure"] = str(error)[:300]
        found = self._rounds(tracks, DUEL_ROUNDS)
        for entry in kept:
            entry["alone_us"] = [alone for alone, _ in found[entry["number"]]]
            if "beside" in task:
                entry["beside_us"] = [beside for _, beside in found[entry["number"]]]
        if "chain" in task and kept and not kept[0]["number"]:
            peers |= self.chains.judge(task, kept)
        for name in ("twin", "torch"):
            if name in found:
                peers[f"{name}_us"] = [alone for alone, _ in found[name]]
                if "beside" in task:
                    peers[f"{name}_beside_us"] = [beside for _, beside in found[name]]
        return peers

    def _rounds(self, tracks: dict[Any, list[Any]], rounds: int) -> dict[Any, list[tuple[list[float], list[float]]]]:
        """Times of (alone, beside) by case; a round takes all tracks in turn, the first one warms up."""
        found: dict[Any, list[tuple[list[float], list[float]]]] = {
            key: [([], []) for _ in graphs] for key, graphs in tracks.items()}
        for number in range(rounds + 1):
            for key, graphs in tracks.items():
                for (alone, beside), kept in zip(graphs, found[key], strict=True):
                    for replay, times in zip((alone, beside), kept, strict=True):
                        if replay is not None:
                            took = replay()
                            if number:
                                times.append(round(took, 3))
        return found

    def together(self, tasks: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]], end: float) -> dict[str, Any]:
        """By chain: the winners of its tasks, and layers with all of them against those of the rules."""
        described, found = {task["name"]: task for task in tasks}, dict[str, Any]()
        for chain in dict.fromkeys(task["chain"] for task in measured if "chain" in task):
            better = [one for task in measured if task.get("chain") == chain
                      and not isinstance(one := decided(task), str) and one.improved]
            if better and time.monotonic() < end:
                numbers = {one.task["name"]: one.winner["number"] for one in better}
                winners = {described[name]["work"]: described[name]["candidates"][at] for name, at in numbers.items()}
                found[chain] = {"winners": numbers, **self.chains.together(chain, winners)}
                print(f"{chain}: {len(better)} winners together", flush=True)
        return found

    # launching

    def _at(self, task: dict[str, Any], number: int) -> None:
        self._note(task["name"], number)

    def _note(self, name: str, number: int) -> None:
        if self.progress is not None:
            self.progress.write_text(json.dumps([name, number]))

    def _stages(self, described: dict[str, Any]) -> list[tuple[Any, list[str]]]:
        return [(self._function(stage["function"]), stage["arguments"]) for stage in described["stages"]]

    def _function(self, name: str) -> Any:
        library = self.libraries[name]
        if library not in self.bench.modules and self.packed is not None:
            (self.bench.folder / library).write_bytes(lzma.decompress((self.packed / f"{library}.xz").read_bytes()))
        return self.bench.kernel({"library": library, "name": name})

    @staticmethod
    def _launch(stages: Sequence[tuple[Any, list[str]]], held: Buffers, buffers: Buffers) -> None:
        for function, arguments in stages:
            function(*[held[name] if name in held else buffers[name] for name in arguments])

    def _launcher(self, candidate: dict[str, Any], case: Case) -> Launch:
        sizes = {"t": case.given["rows"], "b": case.given["rows"]}
        held = {name: case.poisoned([sizes.get(size, size) for size in shape], dtype)
                for name, (shape, dtype) in candidate["temporaries"].items()}
        return partial(self._launch, self._stages(candidate), held)

    def _check(self, launch: Launch, case: Case, expected: dict[str, Any]) -> float:
        """The error as a share of the tolerance; infinite where a second run gives other bits."""
        case.poison()
        launch(case.sets[0])
        first = [case.sets[0][name].clone() for name in case.outputs]
        error = case.errors(expected) / case.tolerance
        case.poison()
        launch(case.sets[0])
        same = all(self.bench.torch.equal(one, case.sets[0][name]) for one, name in zip(first, case.outputs, strict=True))
        return error if same else float("inf")

    def _calls(self, candidate: dict[str, Any], case: Case) -> list[Callable[[], object]]:
        launch = self._launcher(candidate, case)
        return [partial(launch, one) for one in case.sets]

    def _beside(self, task: dict[str, Any], case: Case, alone: Sequence[Callable[[], object]]) -> Callable[[], float] | None:
        """Each call with its neighbour in a step before or behind it, and the data that one hands to the other."""
        if "beside" not in task:
            return None
        given, torch, bench, one = task["beside"], self.bench.torch, self.bench, case.sets[0]
        weight = torch.ones((given["h"],), device=bench.device)
        if given["before"]:
            buffers = {"x": bench.random(tuple(one["x"].shape), "bfloat16"), "weight": weight, "y": one["x"]}
        else:
            buffers = {"x": one["y"], "weight": weight, "y": torch.empty_like(one["y"])}
        neighbour = partial(self._launch, self._stages(given), {}, buffers)
        pairs = [(neighbour, call) if given["before"] else (call, neighbour) for call in alone]

        def call(first: Callable[[], object], second: Callable[[], object]) -> None:
            first()
            second()

        return self._replay(case, [partial(call, *pair) for pair in pairs])

    def _replay(self, case: Case, calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
        ceilings = self.bench.known_ceilings
        least = max(case.read_bytes / ceilings["read_tb_s"], case.flops / ceilings["gemm_tflop_s"]) * 1e-6
        times = 1 if least > LONG_US else -(-CALLS // len(calls))
        replay: Callable[[], float] = self.bench.captured(list(calls) * times)
        return replay


def summary(task: dict[str, Any]) -> str:
    timed = [entry for entry in task["candidates"] if "alone_us" in entry]
    failed = sum("failure" in entry for entry in task["candidates"])
    wrong = sum("error" in entry and entry["error"] >= 1 for entry in task["candidates"])
    text = f"{task['name']}: {len(task['candidates'])} candidates, {failed} failed, {wrong} wrong, {task['seconds']:.1f} s"
    if not timed:
        return text
    which = "beside_us" if "beside_us" in timed[0] else "alone_us"
    means = {entry["number"]: geometric_mean([median(times) for times in entry[which]]) for entry in timed}
    best = min(means, key=lambda number: means[number])
    peer = geometric_mean([median(times) for times in task.get(f"torch_{which.removeprefix('alone_')}") or [[0.0]]])
    choice = next(entry["choice"] for entry in timed if entry["number"] == best)
    return f"{text}; rule {means.get(0, 0):.2f}, best {means[best]:.2f}, torch {peer:.2f} us {choice}"
