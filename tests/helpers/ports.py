"""A port for a program that cannot take one by itself (port 0) and say which."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """One below those that the system gives to whoever asks for any, so nobody takes it until the program binds it."""
    choose = random.SystemRandom()
    for _ in range(1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := choose.randrange(20000, 32000)))
            except OSError:
                continue
            return port
    raise AssertionError("no free port between 20000 and 32000")
