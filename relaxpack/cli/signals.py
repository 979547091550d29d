"""Ctrl-C, SIGTERM and SIGHUP end a command by an exception, so that what it began is cleaned up on the way out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """SIGTERM or SIGHUP came. No KeyboardInterrupt, which a chat takes for the end of an answer."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number      # as shells have it


@contextmanager
def stoppable(numbers: Sequence[signal.Signals] = ENDING) -> Iterator[Callable[[], None]]:
    """Inside, each of these signals raises, Ctrl-C a KeyboardInterrupt and the others Stopped, and does so at the end even
    where the exception struck inside TVM, which makes an error of a pass of it or swallows it. Gives what long work calls
    now and then to notice that. A signal that the caller's shell ignores (nohup) stays ignored; a terminal that closes may
    send SIGHUP twice, and what comes while the first is cleaned up after is not heard."""
    seen: BaseException | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen is None or number == signal.SIGINT:
            seen = KeyboardInterrupt() if number == signal.SIGINT else Stopped(number)
            raise seen

    def check() -> None:
        if seen is not None:
            raise seen

    if threading.current_thread() is not threading.main_thread():
        yield check
        return
    before = {number: signal.signal(number, on_signal) for number in numbers
              if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        yield check
    except Exception:
        if seen is not None:
            raise seen from None
        raise
    else:
        check()             # swallowed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
