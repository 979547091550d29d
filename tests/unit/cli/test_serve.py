"""`relaxpack serve` before anything is loaded: what it refuses, and what it says. A served bundle is in tests/e2e."""

from __future__ import annotations

import sys

import pytest

from relaxpack.cli import run
from relaxpack.cli.serve import _keys
from relaxpack.errors import UsageError


def test_a_bundle_that_is_not_there(capsys):
    assert run(["serve", "nowhere.bundle"]) == 5
    assert "relaxpack build" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(capsys, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("relaxpack.runtime.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert run(["serve", str(tmp_path)]) == 6
    error = capsys.readouterr().err
    assert "fastapi" in error and "pip install 'relaxpack[serve]'" in error


@pytest.mark.parametrize("host", ["256.1.1.1", "203.0.113.7"])
def test_an_address_that_is_not_ours(capsys, tmp_path, host):
    assert run(["serve", str(tmp_path), "--host", host, "--port", "0"]) == 6
    assert "--host" in capsys.readouterr().err


def test_keys_come_from_options_or_the_environment(monkeypatch):
    monkeypatch.delenv("RELAXPACK_API_KEY", raising=False)
    assert _keys([]) == [] and _keys(["a", "b"]) == ["a", "b"]
    monkeypatch.setenv("RELAXPACK_API_KEY", "from outside")
    assert _keys([]) == ["from outside"] and _keys(["a"]) == ["a"]
    for key in ("", "  ", "two\nlines"):
        with pytest.raises(UsageError, match="choose another key"):
            _keys([key])


@pytest.mark.parametrize("arguments", [["--port", "99999"], ["--max-concurrent", "0"], ["--max-body-mib", "none"],
                                       ["--drain-timeout", "-1"], ["--drain-timeout", "inf"],
                                       ["--request-timeout", "nan"]])
def test_values_out_of_range(capsys, tmp_path, arguments):
    assert run(["serve", str(tmp_path), *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err
