"""Connections to a store: how a path or URL becomes an SQLAlchemy engine that survives concurrent writers, forks and
kill -9, and how a driver's errors become ours. Knows the databases' habits, not the tables.

SQLite: WAL, so that readers never wait; every write takes the write lock when it begins (a read that turned into a write
would fail at once instead of waiting); a commit is on disk when it returns. PostgreSQL: what it is by default.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from relaxpack.errors import DatabaseError, EnvironmentProblem

BUSY_SECONDS = 120.0   # how long a writer waits for another one
_POSTGRESQL = ("postgresql", "postgres", "postgresql+psycopg")


def is_postgresql(location: str) -> bool:
    return location.partition("://")[0] in _POSTGRESQL and "://" in location


def shown(location: str) -> str:
    """`location` without the password in it."""
    if not is_postgresql(location):
        return location
    try:
        return make_url(location).render_as_string(hide_password=True)
    except (sa.exc.ArgumentError, ValueError):
        return location.partition("://")[0] + "://..."


def connect(location: str, *, create: bool) -> sa.Engine:
    """An engine for a `postgresql://` URL or the path of an SQLite file. Touches nothing yet but the file's folder."""
    if is_postgresql(location):
        try:
            url = make_url(location).set(drivername="postgresql+psycopg")
            engine = sa.create_engine(url, pool_pre_ping=True, connect_args={"connect_timeout": 20})
        except (sa.exc.ArgumentError, ValueError) as error:
            raise DatabaseError(f"{shown(location)} is not a database URL: {error}; "
                                "expected postgresql://USER:PASSWORD@HOST:PORT/NAME") from None
        except ModuleNotFoundError:
            raise EnvironmentProblem("PostgreSQL needs psycopg: pip install 'relaxpack[tuning]'") from None
        sa.event.listen(engine, "begin", _take_nothing)
        return engine
    path = Path(location)
    if path.is_dir():
        raise DatabaseError(f"{location} is a folder; a store is one file, e.g. {location.rstrip('/')}/tuning.sqlite")
    if not path.exists():
        if not create:
            raise DatabaseError(f"no tuning database at {location}; `relaxpack tune` or `relaxpack db import` makes one")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatabaseError(f"no tuning database can be made at {location}: {error.strerror}: {error.filename}; "
                                "name another place") from None
    if _unchanging(path):
        url = URL.create("sqlite", database=f"file:{quote(str(path.absolute()))}", query={"immutable": "1", "uri": "true"})
        engine = sa.create_engine(url)
    else:
        url = URL.create("sqlite", database=str(path.absolute()))
        engine = sa.create_engine(url, connect_args={"timeout": BUSY_SECONDS})
        sa.event.listen(engine, "connect", _configure_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _unchanging(path: Path) -> bool:
    """A whole store in a folder where nothing can be written, as from a read-only mount: there SQLite cannot make the files
    beside it that it otherwise wants even for reading."""
    return path.exists() and not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()


class Forkable:
    """One engine per process: a connection that went through fork() would be used by two."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine, self._pid = engine, os.getpid()

    @property
    def engine(self) -> sa.Engine:
        if self._pid != os.getpid():
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        return self._engine


@contextmanager
def clear_errors(location: str) -> Iterator[None]:
    """Driver errors as one line that names the database, without statements, parameters and passwords."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        said = " ".join(str(error.orig).split()) or type(error.orig).__name__
        raise DatabaseError(f"{shown(location)}: {_advice(error.orig, said)}") from None
    except sa.exc.SQLAlchemyError as error:
        raise DatabaseError(f"{shown(location)}: {error}") from None


def _advice(error: Any, said: str) -> str:
    if "not a database" in said:
        return "not an SQLite database; give another path, or a bundle to `relaxpack db import`"
    if "malformed" in said or "disk image" in said:
        return f"the file is damaged ({said}); rescue what can be read with the sqlite3 tool's .recover, or pull it again"
    if "readonly" in said or "unable to open" in said:
        return f"cannot be opened for writing ({said}); check the permissions of the file and its folder"
    if "locked" in said:
        return f"another process held the write lock for more than {BUSY_SECONDS:.0f} s"
    if isinstance(error, sqlite3.Error):
        return said
    return f"the database server refused: {said}"


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None          # transactions begin where we say so, in _begin_sqlite
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:                                   # to change the mode is the one thing that does not wait for a lock
            if connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
                break
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    connection.execute("PRAGMA synchronous=FULL")


def _begin_sqlite(connection: sa.Connection) -> None:
    reading = connection.get_execution_options().get("reading", False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _take_nothing(connection: sa.Connection) -> None:
    if connection.get_execution_options().get("reading", False):
        connection.exec_driver_sql("SET TRANSACTION READ ONLY")
