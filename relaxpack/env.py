"""Every environment variable relaxpack reads, typed, in one place."""

from __future__ import annotations

import os

from relaxpack.errors import UsageError


def num_threads() -> int:
    """RELAXPACK_NUM_THREADS: CPU threads of the kernels, at most the cores this process may use, which is the default:
    they wait for each other by spinning, so that two on one core stand still."""
    value, cores = os.environ.get("RELAXPACK_NUM_THREADS"), len(os.sched_getaffinity(0))
    if value is None:
        return cores
    if not (value.isascii() and value.isdigit() and int(value) >= 1):
        raise UsageError(f"RELAXPACK_NUM_THREADS={value!r}: expected a positive integer")
    return min(int(value), cores)


def api_key() -> str | None:
    """RELAXPACK_API_KEY: sent as bearer token by clients of a server."""
    return os.environ.get("RELAXPACK_API_KEY") or None


def tuning_database() -> str:
    """RELAXPACK_TUNING_DB: path or postgresql:// URL of the tuning database; by default a file of this user's."""
    data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.environ.get("RELAXPACK_TUNING_DB") or os.path.join(data, "relaxpack", "tuning.sqlite")
