"""SIGTERM and SIGHUP as exceptions, for every command."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import click
import pytest

import relaxpack.cli as cli
from relaxpack.cli.signals import ENDING, Stopped, stoppable


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def test_what_is_open_is_cleaned_up_and_a_second_signal_does_not_disturb_that() -> None:
    done = []
    with pytest.raises(Stopped) as caught, stoppable():
        try:
            kill(signal.SIGHUP)
            raise AssertionError("went on")
        finally:
            kill(signal.SIGHUP)
            kill(signal.SIGTERM)
            done.append("cleaned up")
    assert done == ["cleaned up"] and caught.value.exit_code == 129 and str(caught.value) == "stopped by SIGHUP"


def test_an_error_that_a_signal_has_become_is_the_signal() -> None:
    with pytest.raises(Stopped), stoppable() as check:
        try:
            kill(signal.SIGTERM)
        except Stopped:
            with pytest.raises(Stopped):
                check()
            raise RuntimeError("of a pass") from None


def test_a_signal_that_was_swallowed_comes_at_the_end() -> None:
    with pytest.raises(Stopped), stoppable(), contextlib.suppress(Stopped):
        kill(signal.SIGTERM)


def test_errors_without_a_signal_are_themselves() -> None:
    with pytest.raises(RuntimeError), stoppable() as check:
        check()
        raise RuntimeError


def test_what_is_ignored_stays_ignored() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            kill(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_have_no_handlers() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    seen: list[object] = []

    def work() -> None:
        with stoppable():
            seen.extend(signal.getsignal(number) for number in ENDING)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == before


@pytest.mark.parametrize("number", ENDING)
def test_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                       number: signal.Signals) -> None:
    partial = tmp_path / "partial"

    @click.command()
    def command() -> None:
        partial.mkdir()
        try:
            kill(number)
        finally:
            partial.rmdir()

    monkeypatch.setattr(cli.LazyGroup, "get_command", lambda self, ctx, name: command)
    assert cli.run(["db"]) == 128 + number and not partial.exists()
    assert capsys.readouterr().err == f"relaxpack: stopped by {number.name}\n"
