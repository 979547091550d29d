"""A server under measurement as a process of its own: started on a free port, waited for, and ended with whatever it
started itself."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_LIBC = ctypes.CDLL(None)


class ServerFailed(Exception):
    """It did not start or ended early; the message has its last words."""


@dataclass(frozen=True)
class Server:
    url: str
    group: int              # of its processes
    start_seconds: float    # until /health said 200

    def cpu_seconds(self) -> float:
        """Processor time of its living processes so far."""
        seconds = 0.0
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):      # it ended meanwhile
                    pid = int(folder.name)
                    if os.getpgid(pid) == self.group:
                        seconds += time.clock_gettime(_clock_of(pid))
        return seconds


def _clock_of(pid: int) -> int:
    """Counts nanoseconds, where /proc/PID/stat counts ticks of 10 ms, which a short run may not fill. Raises OSError."""
    clock = ctypes.c_int()
    if error := _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return clock.value


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that closes, leave the block as Ctrl-C does, so that no server is left behind."""
    def leave(number: int, _: object) -> None:
        sys.exit(f"ended by {signal.Signals(number).name}")
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def running(command_at: Callable[[int], Sequence[str | Path]], log: Path, seconds: float, *,
            env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """The server that `command_at(port)` starts, once its /health says 200, for at most `seconds`. What it says goes to
    `log`. Raises ServerFailed."""
    port = free_port()
    command = command_at(port)
    started = time.monotonic()
    with ended_by_signals(), log.open("wb") as said:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=env,
                                       start_new_session=True)
        except OSError as error:
            raise ServerFailed(f"cannot start {command[0]}: {error.strerror or error}") from error
        try:
            while not _ready(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None:
                    raise ServerFailed(f"ended with code {process.returncode} before it answered: {_last_words(log)}")
                if time.monotonic() - started > seconds:
                    raise ServerFailed(f"does not answer after {seconds:.0f} s: {_last_words(log)}")
                time.sleep(0.1)
            yield Server(f"http://127.0.0.1:{port}", process.pid, time.monotonic() - started)
        finally:
            _end(process)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: politely, then whatever is left of it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def _last_words(log: Path, characters: int = 600) -> str:
    return " ".join(log.read_text(errors="replace").split())[-characters:] or "it said nothing"
