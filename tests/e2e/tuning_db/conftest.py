"""A PostgreSQL server per session, and a fresh location per test for each kind of store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import postgresql

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    if problem := postgresql.missing():
        pytest.skip(problem)
    with postgresql.server() as url:
        yield url


@pytest.fixture
def postgresql_database(postgresql_server: str) -> str:
    return postgresql.new_database(postgresql_server, f"tuning_{next(_numbers)}")


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "tuning.sqlite")
    database: str = request.getfixturevalue("postgresql_database")
    return database
