"""A deployed machine: TVM without its compiler library, no compilers on the path. A bundle built elsewhere runs there and
says the same."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relaxpack.cli import run

ROOT = Path(__file__).parents[2]
ASK = ("--prompt-ids", "5,9,2,40", "--max-tokens", "12", "--temperature", "0", "--json")


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which `tvm` is a copy without libtvm_compiler.so, headers and sources, and nothing else is found."""
    spec = importlib.util.find_spec("tvm")
    assert spec is not None and spec.origin is not None
    site = tmp_path_factory.mktemp("deployed")
    shutil.copytree(Path(spec.origin).parent, site / "tvm", ignore=shutil.ignore_patterns(
        "libtvm_compiler.so", "include", "3rdparty", "src", "web", "licenses", "__pycache__"))
    assert not list(site.rglob("libtvm_compiler*"))
    (site / "empty").mkdir()
    keep = {key: value for key, value in os.environ.items() if key.startswith(("RELAXPACK_", "OPENBLAS_")) or key == "HOME"}
    return {**keep, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "PATH": str(site / "empty")}


def relaxpack(environment: dict[str, str], *arguments: str | Path) -> str:
    done = subprocess.run([sys.executable, "-m", "relaxpack", *map(str, arguments)], env=environment, text=True,
                          capture_output=True, timeout=300, cwd=environment["PATH"])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_bundle_runs_and_answers_the_same(deployed: dict[str, str], tiny_bundle: Path,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    there = json.loads(relaxpack(deployed, "generate", tiny_bundle, *ASK))["completions"][0]["ids"]
    assert run(["generate", str(tiny_bundle), *ASK]) == 0
    assert there == json.loads(capsys.readouterr().out)["completions"][0]["ids"] != []


def test_the_canaries_pass(deployed: dict[str, str], tiny_bundle: Path) -> None:
    assert "BAD" not in relaxpack(deployed, "verify", tiny_bundle)


def test_the_doctor_says_what_it_is(deployed: dict[str, str]) -> None:
    findings = json.loads(relaxpack(deployed, "doctor", "--json"))["findings"]
    found = {(finding["area"], finding["name"]): finding for finding in findings}
    assert found["TVM", "compiler library"]["status"] == "note"
    assert "runtime only" in found["TVM", "loading"]["detail"]
    assert found["building", "linker"]["status"] == "note"


def test_no_compile_side_module_is_loaded(deployed: dict[str, str], tiny_bundle: Path) -> None:
    code = ("import sys\nfrom relaxpack import LLM\n"
            f"LLM({str(tiny_bundle)!r})\n"
            "print('\\n'.join(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], env=deployed, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines())
    assert "tvm" in loaded
    compile_side = ("relaxpack.relax_models", "relaxpack.passes", "relaxpack.schedules", "relaxpack.compile", "tvm.relax",
                    "tvm.s_tir")
    assert not {name for name in loaded if name.startswith(compile_side)}
