"""From a bundle on disk to something that runs: the one place of the runtime that touches bundle, library and engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from relaxpack.dist.bundle import Bundle
from relaxpack.dist.manifest import TargetEntry
from relaxpack.errors import EnvironmentProblem
from relaxpack.model_info import ModelInfo
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.model_runner import CpuModelRunner
from relaxpack.runtime.step_plan import StepExecutor
from relaxpack.runtime.tokenizer import Tokenizer
from relaxpack.runtime.vm import Library, as_tensor, device_for

if TYPE_CHECKING:
    from relaxpack.runtime.cuda_model_runner import CudaModelRunner


@dataclass(frozen=True)
class LoadedModel:
    bundle: Bundle
    info: ModelInfo
    runner: CpuModelRunner | CudaModelRunner
    tokenizer: Tokenizer

    def make_executor(self) -> StepExecutor:
        """How the engine runs steps of this model: tokens are sampled on the device where there is one."""
        if isinstance(self.runner, CpuModelRunner):
            return HostExecutor(self.runner)
        from relaxpack.runtime.cuda_executor import CudaExecutor

        return CudaExecutor(self.runner)


def make_runner(library: Path, entry: TargetEntry, info: ModelInfo, parameters: Iterable[np.ndarray],
                num_pages: int | None = None, graphs: bool = True) -> CpuModelRunner | CudaModelRunner:
    """A runner over a library file and its parameters in manifest order. `graphs`: replay captured decode steps."""
    device = device_for(entry.target.kind)
    if entry.target.kind == "cpu":
        return CpuModelRunner(Library(library, device, map(as_tensor, parameters)), info, num_pages, entry.functions)
    from relaxpack.runtime.cuda_model_runner import CudaModelRunner, upload_parameters

    loaded = Library(library, device, upload_parameters(parameters, device), graphs)
    return CudaModelRunner(loaded, info, device, entry.buckets, num_pages, int(entry.memory_plan.get("arena_bytes", 0)),
                           entry.functions)


def load_runner(bundle: Bundle, kind: str | None = None, num_pages: int | None = None,
                graphs: bool = True) -> CpuModelRunner | CudaModelRunner:
    """The runner of the bundle's best target for this machine, of one `kind` ("cpu", "cuda") if given."""
    entry = bundle.select_target(kind=kind)
    parameters = (array for _, array in bundle.open_params(entry).items(entry.param_order))
    return make_runner(bundle.path(entry.library), entry, bundle.manifest.info_for(entry), parameters, num_pages, graphs)


_first_process: list[int] = []     # id of the process that loaded a model; a fork inherits it


def _refuse_fork() -> None:
    """TVM's threads are not in a fork of a process that has run a model: its first step would wait for them forever."""
    if not _first_process:
        _first_process.append(os.getpid())
    if _first_process[0] != os.getpid():
        raise EnvironmentProblem(f"this process was forked from {_first_process[0]} after that had loaded a model: start it "
                                 "with multiprocessing's 'spawn', or load no model before")


def load_model(path: str | Path, num_pages: int | None = None, kind: str | None = None) -> LoadedModel:
    """Open a bundle, check that it fits this machine, map its parameters and load its library.

    `num_pages`: pages of the KV cache, scratch page included; None: what the limits need and memory allows. `kind`:
    "cpu" or "cuda"; None: the best target. Raises BundleError or EnvironmentProblem.
    """
    bundle = Bundle.open(path)
    _refuse_fork()
    runner = load_runner(bundle, kind, num_pages)
    return LoadedModel(bundle, runner.info, runner, Tokenizer.from_bundle(bundle))
