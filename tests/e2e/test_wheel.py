"""The package as users get it: wheel and source archive, built outside the tree, installed into a fresh environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.bundles import write_bundle

ROOT = Path(__file__).parents[2]
ROOMS = ("relax_models", "passes", "schedules", "dist", "runtime")


def call(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, env=environment,
                          timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """`kind` is "wheel" or "sdist". The build backend is called as pip does, without installing it anew."""
    out.mkdir(parents=True, exist_ok=True)
    call(sys.executable, "-c", f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})", cwd=source)
    (result,) = out.iterdir()
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git knows or would add, in a path with a space."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    copy = tmp_path_factory.mktemp("a source")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_module_and_nothing_else(source: Path, wheel: Path) -> None:
    expected = {str(Path("relaxpack") / path.relative_to(source)): path for room in ROOMS
                for path in (source / room).rglob("*") if path.is_file() and not path.is_symlink()}
    for path in (source / "relaxpack").iterdir():
        if not path.is_symlink() and path.name != "__pycache__":
            files = [path] if path.is_file() else path.rglob("*.py")
            expected |= {str(file.relative_to(source)): file for file in files}
    found = contents(wheel)
    assert sorted(found) == sorted(expected)
    for name, path in expected.items():
        assert found[name] == path.read_bytes(), name


def test_the_source_archive_makes_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    archive = build("sdist", source, tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert contents(build("wheel", unpacked, tmp_path / "again")) == contents(wheel)


def test_installed_it_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment that sees our dependencies, but not our editable install: a .pth file adds a path, and .pth
    files on that path are not read."""
    environment = tmp_path / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    call(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel,
         cwd=tmp_path)
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = call(python, "-c", "import relaxpack.dist.bundle as b, relaxpack; print(relaxpack.__file__, b.__file__)",
                 cwd=tmp_path).split()
    assert all(Path(file).is_relative_to(site) for file in where), where
    assert (site / "relaxpack" / "py.typed").exists()
    script = environment / "bin" / "relaxpack"
    for command in ("build", "chat", "generate", "inspect", "verify", "explain", "doctor"):
        assert command in call(script, "--help", cwd=tmp_path)
    write_bundle(tmp_path / "x.rpk")
    assert "tiny (llama)" in call(script, "inspect", "x.rpk", cwd=tmp_path)
    assert "relaxpack" in call(python, "-m", "relaxpack", "--version", cwd=tmp_path)
