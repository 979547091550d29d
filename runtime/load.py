"""From a bundle on disk to something that runs: the one place of the runtime that touches bundle, library and engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxpack import __version__
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.compat import interface_reasons
from relaxpack.dist.manifest import TargetEntry
from relaxpack.dist.params import TensorRegion
from relaxpack.errors import BundleError, EnvironmentProblem
from relaxpack.model_info import ModelInfo
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.library_facts import LibraryDiffers, check_library
from relaxpack.runtime.model_runner import CpuModelRunner
from relaxpack.runtime.step_plan import StepExecutor
from relaxpack.runtime.tokenizer import Tokenizer
from relaxpack.runtime.vm import Library, as_tensor, device_for

if TYPE_CHECKING:
    from relaxpack.runtime.cuda_model_runner import CudaModelRunner, WarmUp
    from relaxpack.runtime.device_plan import Comparison, DevicePlan

Progress = Callable[[int, int], None]      # (done, all)


def _silent(done: int, total: int) -> None:
    return None


@dataclass
class LoadReport:
    """What loading took. A CPU maps its weights, which costs nothing until they are read; a GPU copies them."""

    target: str
    weight_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)    # by part: library, weights, memory
    plan: DevicePlan | None = None
    note: str = ""       # what somebody should know who runs it

    def to_json(self) -> dict[str, Any]:
        copied = self.plan is not None and self.seconds.get("weights")
        return {"target": self.target, "weight_bytes": self.weight_bytes, "seconds": self.seconds,
                "weights_gigabytes_per_second": self.weight_bytes / self.seconds["weights"] / 1e9 if copied else None,
                "memory_plan": self.plan.to_json() if self.plan else None}

    def __str__(self) -> str:
        seconds = ", ".join(f"{part} {value:.2f} s" for part, value in self.seconds.items())
        rate = self.to_json()["weights_gigabytes_per_second"]
        how = "mapped" if self.plan is None else f"copied at {rate:.1f} GB/s" if rate else "copied"
        return f"{self.target}: {self.weight_bytes / 1e9:.2f} GB of weights {how} ({seconds})"


@dataclass(frozen=True)
class LoadedModel:
    bundle: Bundle
    info: ModelInfo
    runner: CpuModelRunner | CudaModelRunner
    tokenizer: Tokenizer
    report: LoadReport

    def make_executor(self) -> StepExecutor:
        """How the engine runs steps of this model: tokens are sampled on the device where there is one."""
        if isinstance(self.runner, CpuModelRunner):
            return HostExecutor(self.runner)
        from relaxpack.runtime.cuda_executor import CudaExecutor

        return CudaExecutor(self.runner)

    def warm_up(self, progress: Progress = _silent) -> WarmUp | None:
        """Capture every graph, so that no request waits for one; None where nothing is captured. `progress`: graphs."""
        if isinstance(self.runner, CpuModelRunner) or not self.runner.buckets:
            return None
        return self.runner.warm_up(progress)


    def compare_plan(self) -> Comparison | None:
        """After `warm_up`: the plan against the driver; None on a CPU."""
        return None if isinstance(self.runner, CpuModelRunner) else self.runner.compare_plan()


def make_runner(library: Path, entry: TargetEntry, info: ModelInfo, parameters: Sequence[TensorRegion | np.ndarray],
                num_pages: int | None = None, graphs: bool = True, progress: Progress = _silent,
                report: LoadReport | None = None, writer: str = __version__) -> CpuModelRunner | CudaModelRunner:
    """A runner over a library file and its parameters in manifest order. `graphs`: replay captured decode steps.
    `progress`: bytes of weights. `report` is filled in. `writer`: the relaxpack that built the library. Raises
    LibraryDiffers where that was compiled for something else than `entry` and `info` say."""
    took = (report or LoadReport(entry.target.name, 0)).seconds
    device = device_for(entry.target.kind)
    if entry.target.kind == "cpu":
        arrays = [_mapped(parameter) for parameter in parameters]
        with _timed(took, "library"):
            opened = Library(library, device, map(as_tensor, arrays))
            check_library(opened.facts(), entry, info, writer)
        return CpuModelRunner(opened, info, num_pages, entry.functions)
    from relaxpack.runtime import cuda_memory
    from relaxpack.runtime.cuda_model_runner import CudaModelRunner
    from relaxpack.runtime.library.provide import provide
    from relaxpack.runtime.upload import upload

    free_before = cuda_memory.free_and_total()[0]
    workspace = provide(entry.libraries, device)
    with _timed(took, "weights"):
        uploaded = upload(parameters, device, progress)
    with _timed(took, "library"):
        opened = Library(library, device, uploaded.tensors, graphs)
        check_library(opened.facts(), entry, info, writer)
    with _timed(took, "memory"):
        sizes = [parameter.bytes if isinstance(parameter, TensorRegion) else parameter.nbytes for parameter in parameters]
        runner = CudaModelRunner(opened, info, device, entry.buckets, num_pages, entry.memory_plan, entry.functions,
                                 weight_sizes=sizes, free_before=free_before, library_bytes=workspace, spread=entry.spread)
    if report is not None:
        report.weight_bytes, report.plan = uploaded.bytes, runner.plan
    return runner


def load_runner(bundle: Bundle, kind: str | None = None, num_pages: int | None = None, graphs: bool = True,
                progress: Progress = _silent, report: LoadReport | None = None) -> CpuModelRunner | CudaModelRunner:
    """The runner of the bundle's best target for this machine, of one `kind` ("cpu", "cuda") if given."""
    entry, writer = bundle.select_target(kind=kind), bundle.manifest.relaxpack_version
    if reasons := interface_reasons(entry, writer):
        raise BundleError(f"{bundle.location}: {reasons[0]}")
    params = bundle.open_params(entry)
    # A GPU's parameters are read where they lie; a CPU's are mapped and stay there.
    parameters: list[TensorRegion | np.ndarray] = [
        params[name] if entry.target.kind == "cpu" else params.region(name) for name in entry.param_order]
    if report is not None:
        report.target = entry.target.name
        if entry.canary and entry.canary.get("recorded_by") != entry.target.name:
            report.note = (f"{entry.target.name} could not run where it was built: relaxpack verify BUNDLE --device "
                           f"{entry.target.kind} checks its answers here")
        report.weight_bytes = sum(params.region(name).bytes for name in entry.param_order)
    try:
        return make_runner(bundle.path(entry.library), entry, bundle.manifest.info_for(entry), parameters, num_pages, graphs,
                           progress, report, writer)
    except LibraryDiffers as error:
        raise LibraryDiffers(f"{bundle.location}: {error}") from None


def _mapped(parameter: TensorRegion | np.ndarray) -> np.ndarray:
    assert isinstance(parameter, np.ndarray), "a CPU's parameters are arrays"
    return parameter


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - begin, 3)


_first_process: list[int] = []     # id of the process that loaded a model; a fork inherits it


def _refuse_fork() -> None:
    """TVM's threads are not in a fork of a process that has run a model: its first step would wait for them forever."""
    if not _first_process:
        _first_process.append(os.getpid())
    if _first_process[0] != os.getpid():
        raise EnvironmentProblem(f"this process was forked from {_first_process[0]} after that had loaded a model: start it "
                                 "with multiprocessing's 'spawn', or load no model before")


def load_model(path: str | Path, num_pages: int | None = None, kind: str | None = None,
               progress: Progress = _silent) -> LoadedModel:
    """Open a bundle, check that it fits this machine, map or upload its parameters and load its library.

    `num_pages`: pages of the KV cache, scratch page included; None: what the limits need and memory allows. `kind`:
    "cpu" or "cuda"; None: the best target. `progress`: bytes of weights that were copied. Raises BundleError or
    EnvironmentProblem.
    """
    bundle = Bundle.open(path)
    _refuse_fork()
    report = LoadReport("", 0)
    runner = load_runner(bundle, kind, num_pages, progress=progress, report=report)
    return LoadedModel(bundle, runner.info, runner, Tokenizer.from_bundle(bundle), report)
