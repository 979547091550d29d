"""The shape of the project: public names, lazy imports, which side may load what, packaging, links."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import relaxpack
from relaxpack.cli import COMMANDS

ROOT = Path(__file__).parents[2]
ROOMS = ("relax_models", "passes", "schedules", "dist", "runtime")
PACKAGES = tuple(f"relaxpack/{path.name}" for path in sorted((ROOT / "relaxpack").iterdir())     # beside the links
                 if path.is_dir() and not path.is_symlink() and any(path.glob("*.py")))
TVM = re.compile(r"^\s*(?:import|from) (?:tvm|tvm_ffi)\b", re.MULTILINE)
DOOR = re.compile(r"^\s*(?:import relaxpack\.tvm_setup|from relaxpack import tvm_setup|"
                  r"from relaxpack\.tvm_setup import)", re.MULTILINE)
COMPILE_SIDE = ("relaxpack.relax_models", "relaxpack.passes", "relaxpack.schedules", "relaxpack.compile")


def tracked() -> list[Path]:
    """Files git knows; in an unpacked source archive, all files of the project."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).exists()]


def loaded_by(code: str) -> set[str]:
    """Modules in a fresh interpreter after running `code`."""
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}\nprint('\\n'.join(sys.modules))"], cwd=ROOT,
                          check=True, capture_output=True, text=True, timeout=300)
    return set(done.stdout.splitlines())


def top_level(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def modules_of(room: str) -> list[str]:
    return [".".join(("relaxpack", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
            for path in sorted((ROOT / room).rglob("*.py"))]


def test_public_names() -> None:
    assert sorted(relaxpack.__all__) == ["Bundle", "LLM", "__version__", "build_bundle"]
    assert set(relaxpack.__all__) <= set(dir(relaxpack))        # what completion in an editor or a shell offers
    for name in relaxpack.__all__:
        value = getattr(relaxpack, name)
        assert value.__module__.startswith("relaxpack.") if name != "__version__" else value
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = relaxpack.nothing


@pytest.mark.parametrize("code", ["import relaxpack", "import relaxpack.cli; relaxpack.cli.run(['--help'])",
                                  "import relaxpack.dist.manifest, relaxpack.dist.compat"])
def test_light_imports(code: str) -> None:
    heavy = {"tvm", "tvm_ffi", "numpy", "torch", "transformers", "fastapi", "tokenizers", "jinja2"}
    assert not top_level(loaded_by(code)) & heavy


def test_opening_a_bundle_needs_no_tvm() -> None:
    loaded = loaded_by("import relaxpack.dist.bundle, relaxpack.dist.params, relaxpack.dist.describe, relaxpack.doctor")
    assert "tvm" not in loaded and "tvm_ffi" not in loaded


def test_every_command_names_a_module_or_is_absent() -> None:
    for name, command in COMMANDS.items():
        module = ROOT / (command.path.partition(":")[0].replace(".", "/") + ".py")
        package = module.with_suffix("") / "__init__.py"
        assert command.path.partition(":")[0] == f"relaxpack.cli.{name.replace('-', '_')}"
        assert command.help and (not module.exists() or not package.exists())


def imports(path: Path) -> set[str]:
    """Absolute names imported anywhere in a file, late imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_rooms_are_imported_by_their_one_name() -> None:
    """`import passes` works in the checkout, and makes a second copy of every class."""
    for path in tracked():
        if path.suffix == ".py":
            assert not top_level(imports(path)) & set(ROOMS), f"{path.relative_to(ROOT)}: import relaxpack.ROOM"


@pytest.mark.parametrize("room", ["runtime", "dist"])
def test_a_deployed_machine_needs_no_compiler(room: str) -> None:
    for path in (ROOT / room).rglob("*.py"):
        wrong = [name for name in imports(path) if name.startswith(COMPILE_SIDE)
                 or name.startswith(("tvm.relax", "tvm.s_tir", "tvm.script", "tvm.tirx"))]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_importing_the_runtime_loads_no_compile_side_module() -> None:
    modules = [name for room in ("runtime", "dist") for name in modules_of(room) if ".server" not in name]
    loaded = loaded_by("import importlib\n"
                       f"for name in {modules}: importlib.import_module(name)")
    assert set(modules) <= loaded
    assert not {name for name in loaded if name.startswith(COMPILE_SIDE)}


def test_references_for_tests_are_never_imported_by_the_package() -> None:
    """(TVM's own FFI imports torch where it is installed, so sys.modules would not tell.)"""
    for room in (*ROOMS, *PACKAGES, "relaxpack"):
        for path in (ROOT / room).glob("**/*.py" if room != "relaxpack" else "*.py"):
            names = top_level(imports(path))
            assert not names & {"torch", "transformers", "pytest", "hypothesis"}, path.relative_to(ROOT)


def test_tvm_is_imported_through_its_door() -> None:
    """`import relaxpack.tvm_setup` stands before the first `import tvm` of a file."""
    for room in (*ROOMS, "relaxpack"):
        for path in (ROOT / room).rglob("*.py"):
            if path.name == "tvm_setup.py" or (path.is_relative_to(ROOT / "relaxpack") and room != "relaxpack"):
                continue
            text = path.read_text()
            first = TVM.search(text)
            if first and "TYPE_CHECKING" not in text[:first.start()]:
                door = DOOR.search(text)
                assert door and door.start() < first.start(), f"{path.relative_to(ROOT)}: relaxpack.tvm_setup first"


def test_rooms_are_relative_links() -> None:
    for room in ROOMS:
        link = ROOT / "relaxpack" / room
        assert os.readlink(link) == f"../{room}" and (link / "__init__.py").exists()
        # One module, one copy: the link's name and no other.
        assert not (ROOT / room).is_symlink()


def test_every_folder_with_modules_is_a_package() -> None:
    """A folder without __init__.py would be left out of the wheel."""
    for room in (*ROOMS, *PACKAGES):
        for path in (ROOT / room).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path.parent.relative_to(ROOT)


def test_data_files_are_packaged() -> None:
    """Every file in a room that is not Python is named in package-data, else the wheel lacks it."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for package, globs in patterns.items() for pattern in globs
                for path in (ROOT / package.replace(".", "/")).resolve().glob(pattern)}
    rooms = [ROOT / room for room in (*ROOMS, "relaxpack")]
    data = {path for path in tracked() if path.suffix != ".py" and not path.is_symlink()
            and any(path.is_relative_to(room) for room in rooms)}
    assert data <= packaged, sorted(str(path.relative_to(ROOT)) for path in data - packaged)


def test_no_paths_of_a_machine_in_tracked_files() -> None:
    here = {f"{ROOT}/", f"{Path.home()}/", f"{sys.prefix}/" if sys.prefix != sys.base_prefix else ""} - {"/", "//", ""}
    for path in tracked():
        if path.is_symlink():
            assert not os.path.isabs(os.readlink(path)), path
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for place in here:
            assert place not in text, f"{path.relative_to(ROOT)} names {place}"


def test_files_say_what_they_are_for() -> None:
    for path in tracked():
        if path.suffix == ".py" and path.stat().st_size and path.name != "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)} has no module docstring"


def test_links_in_documents_lead_somewhere() -> None:
    for path in tracked():
        if path.suffix == ".md":
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
                if "://" not in target and not target.startswith("mailto:"):
                    assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_what_tests_and_lint_need_is_bounded_and_is_what_runs_here() -> None:
    """A new release with a new warning or rule must not turn a clone red overnight."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for group, wanted in groups.items():
        for requirement in map(Requirement, wanted):
            operators = {one.operator for one in requirement.specifier}
            assert operators == {">=", "<"} or operators == {"=="}, f"{group}: {requirement} has no bound on one side"
            try:
                installed = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                continue                    # of a group that is not installed here
            assert requirement.specifier.contains(installed), f"{group}: {requirement} but {installed} is here"
