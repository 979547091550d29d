"""One code for one kind of mistake, and a page that names them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import relaxpack.cli as cli
from relaxpack import errors
from tests.helpers.bundles import write_bundle

PAGE = Path(__file__).parents[3] / "docs" / "exit_codes.md"


def test_the_page_names_every_code() -> None:
    codes = {kind.exit_code for kind in vars(errors).values()
             if isinstance(kind, type) and issubclass(kind, errors.RelaxpackError)}
    listed = re.findall(r"^\| ([\d, ]+) \|", PAGE.read_text(), re.MULTILINE)
    assert [int(code) for row in listed for code in row.split(",")] == [0, *sorted(codes), 129, cli.INTERRUPTED, 143]


@pytest.mark.parametrize("command", [
    ["chat", "no.bundle"], ["generate", "no.bundle", "hi"], ["serve", "no.bundle"], ["inspect", "no.bundle"],
    ["verify", "no.bundle"], ["explain", "no.bundle"], ["diff", "no.bundle", "other.bundle"],
    ["bench", "latency", "no.bundle"], ["bench", "serve", "no.bundle"]], ids=" ".join)
def test_a_bundle_that_is_not_there(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(command) == errors.BundleError.exit_code
    assert capsys.readouterr().err == ("relaxpack: no.bundle does not exist; build a bundle with: relaxpack build MODEL -o "
                                       "no.bundle\n")


@pytest.mark.parametrize(("output", "words"), [
    ("there.bundle", "exists; pass --force"), ("some", "is not a bundle"), (".", "you stand in"),
    ("some/file/x.bundle", "is a file")])
def test_an_output_that_is_not_written_is_a_mistake_of_the_command_line(
        output: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(tmp_path / "there.bundle")
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert cli.run(["build", "smollm2", "-o", output]) == errors.UsageError.exit_code
    assert words in capsys.readouterr().err
