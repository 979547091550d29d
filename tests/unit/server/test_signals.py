"""What a server does on SIGHUP, which every other command takes as an exception."""

from __future__ import annotations

import signal

import pytest

from relaxpack.runtime.server.limits import Limits
from relaxpack.runtime.server.serve import make_server
from tests.helpers.server import hash_model


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_sighup_drains_unless_it_is_ignored(before: signal.Handlers) -> None:
    model = hash_model()
    server = make_server(model, Limits())
    kept = signal.signal(signal.SIGHUP, before)
    try:
        with server.capture_signals():
            signal.raise_signal(signal.SIGHUP)
        assert server.should_exit == (before is signal.SIG_DFL) and not server.force_exit
        assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, kept)
        model.engine.close()
