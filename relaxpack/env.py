"""Every environment variable relaxpack reads, typed, in one place."""

from __future__ import annotations

import os
from pathlib import Path

from relaxpack.errors import UsageError


def num_threads() -> int:
    """RELAXPACK_NUM_THREADS: CPU threads of the kernels; default: the cores this process may use."""
    value = os.environ.get("RELAXPACK_NUM_THREADS")
    if value is None:
        return len(os.sched_getaffinity(0))
    if not value.isdigit() or int(value) < 1:
        raise UsageError(f"RELAXPACK_NUM_THREADS={value!r}: expected a positive integer")
    return int(value)


def cache_dir() -> Path:
    """RELAXPACK_CACHE: where built bundles and stores live; default: $XDG_CACHE_HOME/relaxpack."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("RELAXPACK_CACHE") or Path(base) / "relaxpack")


def api_key() -> str | None:
    """RELAXPACK_API_KEY: sent as bearer token by clients of a server."""
    return os.environ.get("RELAXPACK_API_KEY") or None
