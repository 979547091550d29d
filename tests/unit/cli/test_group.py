"""The command group: fast, lazy, one line per error, exit codes by class."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import click
import pytest

import relaxpack.cli as cli
from relaxpack import __version__
from relaxpack.errors import BundleError, RelaxpackError, RequestError


@pytest.fixture
def command(monkeypatch):
    """Register a command `boom` that raises what the test wants."""
    def register(body):
        module = type(sys)("relaxpack_test_command")
        module.boom = click.command("boom")(click.option("--size", type=int)(body))
        monkeypatch.setitem(sys.modules, "relaxpack_test_command", module)
        module.__spec__ = importlib_spec("relaxpack_test_command")
        monkeypatch.setitem(cli.COMMANDS, "boom", cli.LazyCommand("relaxpack_test_command:boom", "Test."))
    return register


def importlib_spec(name):
    from importlib.machinery import ModuleSpec

    return ModuleSpec(name, None)


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **options)


def test_help_imports_neither_tvm_nor_numpy():
    done = python("import sys, relaxpack.cli as c; code = c.run(['--help']); "
                  "heavy = {'tvm', 'numpy', 'tokenizers', 'jinja2', 'rich'} & set(sys.modules); "
                  "sys.exit(code or (str(heavy) if heavy else 0))")
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout and "chat" in done.stdout


@pytest.mark.parametrize("name", cli.group.list_commands(None))
def test_help_of_every_command(name, capsys):
    assert cli.run([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: relaxpack {name}")


def test_commands_without_a_module_are_not_listed(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "later", cli.LazyCommand("relaxpack.cli.no_such_module:later", "Later."))
    assert "later" not in cli.group.list_commands(None)


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"relaxpack {__version__}\n"


@pytest.mark.parametrize("args, words", [
    (["genrate"], ["no command 'genrate'", "did you mean generate?"]),
    (["zzz"], ["no command 'zzz'", "known are", "generate"]),
    (["generate"], ["Missing argument", "relaxpack generate --help"]),
    (["generate", "b", "x", "--temprature", "1"], ["--temprature", "--temperature"]),
])
def test_usage_errors_are_one_line_with_exit_code_2(args, words, capsys):
    assert cli.run(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("relaxpack: ")
    assert all(word in err for word in words)


@pytest.mark.parametrize("error, exit_code", [
    (BundleError("no bundle:\n  here"), 5), (RequestError("too long"), 7), (RelaxpackError("x"), 1)])
def test_errors_are_one_line_with_their_exit_code(command, capsys, error, exit_code):
    def body(size):
        raise error
    command(body)
    assert cli.run(["boom"]) == exit_code
    out, err = capsys.readouterr()
    assert out == "" and err == f"relaxpack: {' '.join(str(error).split())}\n"


def test_ctrl_c(command, capsys):
    def body(size):
        raise KeyboardInterrupt
    command(body)
    assert cli.run(["boom"]) == 130
    assert capsys.readouterr().err == "relaxpack: interrupted\n"


def test_a_bug_shows_its_traceback(command):
    def body(size):
        raise ZeroDivisionError
    command(body)
    with pytest.raises(ZeroDivisionError):
        cli.run(["boom"])


@pytest.mark.parametrize("error, words", [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
    (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/x/y"), "Permission denied: /x/y"),
    (MemoryError("Unable to allocate 8 TiB"), "not enough memory: Unable to allocate 8 TiB")])
def test_what_the_machine_refuses_is_one_line(command, capfd, error, words):
    def body(size):
        raise error
    command(body)
    assert cli.run(["boom"]) == 6
    err = capfd.readouterr().err
    assert words in err and err.startswith("relaxpack: ") and err.count("\n") == 1


def test_closed_and_full_and_narrow_outputs():
    """Standard output may be closed, on a full disk, or in an encoding that lacks most characters."""
    def shell(line, **environment):
        return subprocess.run(line, shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=300,
                              env={**os.environ, "PYTHONPATH": ":".join(sys.path), **environment})
    done = shell(f"{sys.executable} -m relaxpack --help >&-")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"{sys.executable} -m relaxpack --help >/dev/full")
    assert done.returncode == 6 and done.stderr == "relaxpack: the system refused: No space left on device\n"
    code = "import sys, relaxpack.cli as c; c.run(['--version']); print('日本')"
    assert shell(f"{sys.executable} -c \"{code}\"", PYTHONIOENCODING="ascii").stdout.endswith("\n??\n")


def test_returned_exit_code_is_kept(command):
    command(lambda size: 3)
    assert cli.run(["boom"]) == 3
    command(lambda size: None)
    assert cli.run(["boom"]) == 0


def test_broken_pipe_is_quiet():
    code = ("import sys, types, click, relaxpack.cli as c; from importlib.machinery import ModuleSpec\n"
            "m = types.ModuleType('m'); m.__spec__ = ModuleSpec('m', None); sys.modules['m'] = m\n"
            "m.f = click.command('f')(lambda: [print('x' * 1000) for _ in range(1000)] and None)\n"
            "c.COMMANDS['f'] = c.LazyCommand('m:f', ''); sys.exit(c.run(['f']))")
    done = subprocess.run(f"{sys.executable} -c \"$CODE\" | head -c 10; echo ${{PIPESTATUS[0]}}", shell=True,
                          executable="/bin/bash", env={"CODE": code, "PYTHONPATH": ":".join(sys.path)},
                          capture_output=True, text=True, timeout=300)
    assert done.stderr == "" and done.stdout == "x" * 10 + "1\n"
