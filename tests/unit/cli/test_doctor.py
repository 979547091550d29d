"""The doctor's findings where things are missing or broken; TVM is never loaded in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from relaxpack import doctor
from relaxpack.cli import run
from relaxpack.dist.host import CudaDriver, Gpu

STATUSES = {"ok", "note", "problem"}


def find(findings: list[doctor.Finding], area: str, name: str) -> doctor.Finding:
    return next(f for f in findings if (f.area, f.name) == (area, name))


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the one slow check, loading TVM."""
    monkeypatch.setattr(doctor, "_load_tvm", lambda: doctor.Finding("TVM", "loading", "ok", "not tried"))


def test_every_finding_that_is_not_ok_says_what_next(light: None) -> None:
    findings = doctor.examine()
    assert {f.area for f in findings} == {"versions", "TVM", "CPU", "memory", "CUDA", "building", "extras"}
    for finding in findings:
        assert finding.status in STATUSES and finding.detail
        assert finding.status == "ok" or finding.next_step, finding


def test_a_missing_extra_is_named(light: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_present", lambda module: module != "sqlalchemy")
    tuning = find(doctor.examine(), "extras", "tuning")
    assert tuning.next_step == "pip install 'relaxpack[tuning]'" and "no sqlalchemy" in tuning.detail


def test_command(light: None, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor"])
    text = capsys.readouterr().out
    assert code in (0, 6) and "instruction sets" in text and "RAM" in text
    assert run(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


def test_without_tvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    finding = find(list(doctor._tvm()), "TVM", "apache-tvm")
    assert finding.status == "problem" and "not installed" in finding.detail and finding.next_step


def test_a_tvm_without_compiler_is_no_problem(light: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tvm" / "lib").mkdir(parents=True)
    (tmp_path / "tvm" / "__init__.py").touch()
    (tmp_path / "tvm" / "lib" / "libtvm_runtime_cuda.so").touch()
    monkeypatch.delitem(sys.modules, "tvm", raising=False)   # another test may have loaded the real one
    monkeypatch.syspath_prepend(tmp_path)
    findings = list(doctor._tvm())
    assert find(findings, "TVM", "compiler library").status == "note"
    assert "runs bundles and does not build" in find(findings, "TVM", "compiler library").detail
    assert find(findings, "TVM", "CUDA runtime library").status == "ok"
    assert not [f for f in findings if f.status == "problem"]


@pytest.mark.parametrize(("code", "detail"), [
    ("import os; os.kill(os.getpid(), 11)", "crashed with signal 11"),
    ("from relaxpack.errors import EnvironmentProblem; raise EnvironmentProblem('tvm 1 is installed: pip install x')",
     "tvm 1 is installed: pip install x"),
    ("raise ImportError('libfoo.so')", "ImportError: libfoo.so")])
def test_a_tvm_that_does_not_load(monkeypatch: pytest.MonkeyPatch, code: str, detail: str) -> None:
    monkeypatch.setattr(doctor, "_LOAD_TVM", code)
    finding = doctor._load_tvm()
    assert finding.status == "problem" and detail in finding.detail
    assert "pip install" in finding.detail + finding.next_step


def test_old_cpu_and_small_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "host_cpu_features", lambda: ("avx2", "fma"))
    monkeypatch.setattr(doctor, "num_threads", lambda: 64)
    monkeypatch.setattr(doctor, "_cpu_quota", lambda: 2.5)
    findings = list(doctor._cpu())
    assert find(findings, "CPU", "instruction sets").status == "problem"
    assert find(findings, "CPU", "threads").next_step == "set RELAXPACK_NUM_THREADS=2"


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("NVIDIA H200", (9, 0), 150_000_000_000)
    monkeypatch.setattr(doctor, "cuda_driver", lambda: CudaDriver((12, 4), (gpu,)))
    findings = list(doctor._cuda())
    assert find(findings, "CUDA", "driver").status == "problem"
    assert find(findings, "CUDA", "GPU").detail == "NVIDIA H200, 150 GB, sm_90"
    monkeypatch.setattr(doctor, "cuda_driver", lambda: CudaDriver((13, 0), (gpu,)))
    assert find(list(doctor._cuda()), "CUDA", "driver").status == "ok"


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise PermissionError("no /proc")

    monkeypatch.setattr(doctor, "_memory", broken)
    monkeypatch.setattr(doctor, "_tvm", lambda: [])
    assert [f.detail for f in doctor.examine() if f.area == "doctor"] == ["the check failed: no /proc"]


def test_works_where_only_the_standard_library_and_click_and_rich_are() -> None:
    """No TVM, no NumPy: the doctor is for machines where things are missing."""
    code = ("import sys; sys.modules.update(dict.fromkeys(['tvm', 'numpy', 'tvm_ffi'])); import importlib.util as u; "
            "f = u.find_spec; u.find_spec = lambda n, p=None: None if n in ('tvm', 'numpy') else f(n, p); "
            "from relaxpack.cli import run; sys.exit(run(['doctor']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          cwd=Path(__file__).parents[3])
    assert done.returncode == 6, done.stderr
    assert "apache-tvm" in done.stdout and "not installed" in done.stdout and done.stderr == ""
