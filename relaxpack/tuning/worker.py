"""`Worker`: a process in which candidates are built or run. What a candidate does to it costs one trial and no more: it is
killed at its deadline by the process that waits, a crash is the end of its pipe, and the next call starts a fresh one.

The child is `python -m relaxpack.tuning.worker`: length-prefixed pickles, requests on standard input, answers on a
descriptor of its own. It dies with its parent.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import TracebackType
from typing import IO, Any

START_SECONDS = 120.0   # until a child has imported TVM, on a machine under load


class CandidateFailed(Exception):
    """A candidate did not build, crashed, hung or raised: one trial is lost. The message is one line."""


class Worker:
    """`call("module:function", ...)` there, with a deadline here. Use as a context manager."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: int = -1
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def call(self, function: str, *args: Any, timeout: float) -> Any:
        """The function's answer. Raises CandidateFailed if it raises, dies, or is not done after `timeout` seconds."""
        try:
            if self._process is None:
                self._start()
            self._send((function, args))
            ok, value = self._receive(timeout)
        except BaseException:
            self.close()
            raise
        if not ok:
            raise CandidateFailed(value)
        return value

    def close(self) -> None:
        """Kill the child and all it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdin is not None and self._log is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        os.close(self._answers)
        self._log.close()

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()
        self._answers, theirs = os.pipe()
        try:
            self._process = _starter().submit(
                subprocess.Popen, [sys.executable, "-m", "relaxpack.tuning.worker", str(theirs), str(os.getpid())],
                stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, pass_fds=(theirs,), start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **self._environment}).result()
        finally:
            os.close(theirs)
        self._receive(START_SECONDS)

    def _send(self, request: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        data = pickle.dumps(request)
        try:
            self._process.stdin.write(struct.pack("<Q", len(data)) + data)
            self._process.stdin.flush()
        except OSError:
            raise CandidateFailed(self._death()) from None

    def _receive(self, timeout: float) -> tuple[bool, Any]:
        deadline = time.monotonic() + timeout
        size, = struct.unpack("<Q", self._read(8, deadline, timeout))
        answer: tuple[bool, Any] = pickle.loads(self._read(size, deadline, timeout))
        return answer

    def _read(self, size: int, deadline: float, timeout: float) -> bytes:
        data = b""
        while len(data) < size:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise CandidateFailed(f"not done after {timeout:g} s")
            piece = os.read(self._answers, min(size - len(data), 1 << 20))
            if not piece:
                raise CandidateFailed(self._death())
            data += piece
        return data

    def _death(self) -> str:
        assert self._process is not None and self._log is not None
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        how = f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
        return how + (f": {lines[-1][:200]}" if lines and code >= 0 else "")


@cache
def _starter() -> ThreadPoolExecutor:
    """The one thread that starts children, and lives as long as this process: the kernel kills a child that asked for it
    (`_die_with`) at the end of the thread that started it, not of the process."""
    return ThreadPoolExecutor(1, "worker-starter")


def _die_with(parent: int) -> None:
    """PR_SET_PDEATHSIG: no child outlives a parent that was killed with -9."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    answers, parent = int(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    import resource

    import relaxpack.tvm_setup  # noqa: F401
    import tvm  # noqa: F401

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL):
        signal.signal(number, signal.SIG_DFL)      # TVM's handlers print a backtrace for a minute
    out = os.fdopen(answers, "wb")
    requests, stdin = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)
    source = os.fdopen(requests, "rb")

    def answer(ok: bool, value: Any) -> None:
        data = pickle.dumps((ok, value))
        out.write(struct.pack("<Q", len(data)) + data)
        out.flush()

    answer(True, None)
    while header := source.read(8):
        name, args = pickle.loads(source.read(struct.unpack("<Q", header)[0]))
        try:
            module, _, function = name.partition(":")
            answer(True, getattr(importlib.import_module(module), function)(*args))
        except Exception as error:
            lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
            answer(False, f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300])


if __name__ == "__main__":
    main()
