"""Runs something on a given number of TVM's threads. A worker of pytest-xdist has one (tests/conftest.py), so what a second
thread could break in a kernel is looked for with these."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm


def on_threads(count: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, its kernels on `count` threads."""
    return _launcher(count).submit(function, *arguments).result()


@cache
def _launcher(count: int) -> ThreadPoolExecutor:
    """A thread with a pool of its own: TVM makes one for each thread that runs kernels, and reads its size then."""
    def make_pool() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TVM_NUM_THREADS", str(count))
            assert tvm.get_global_func("runtime.NumThreads")() == count

    return ThreadPoolExecutor(1, initializer=make_pool)
