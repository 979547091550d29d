"""Environment variables: typed, and refused where they make no sense."""

from __future__ import annotations

import os

import pytest

from relaxpack.env import num_threads
from relaxpack.errors import UsageError


def test_threads_are_at_most_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5})
    monkeypatch.delenv("RELAXPACK_NUM_THREADS", raising=False)
    assert num_threads() == 3
    for given, expected in (("2", 2), ("3", 3), ("1000", 3)):
        monkeypatch.setenv("RELAXPACK_NUM_THREADS", given)
        assert num_threads() == expected


@pytest.mark.parametrize("value", ["0", "-1", "two", "", "²"])
def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RELAXPACK_NUM_THREADS", value)
    with pytest.raises(UsageError, match="positive integer"):
        num_threads()
