"""The tables of a store, the same for SQLite and PostgreSQL, and the version written in them (docs/tuning_database.md).
Creates what is missing; refuses a newer version and a database that is something else.
"""

from __future__ import annotations

import sqlalchemy as sa

from relaxpack.errors import DatabaseError, NewerDatabaseError

SCHEMA_VERSION = 1
_LOCK = 0x72707475   # an advisory lock of ours, so that two first users do not both create the tables

metadata = sa.MetaData()

facts = sa.Table(
    "relaxpack_facts", metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False))

# The text of a workload is long and shared by all its records.
workloads = sa.Table(
    "relaxpack_workloads", metadata,
    sa.Column("digest", sa.String(64), primary_key=True),   # of kind, name, hash and text
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.Text, nullable=False),
    sa.Column("text", sa.Text, nullable=False))

# `content` is the record's canonical JSON without the workload; the columns beside it repeat what queries need.
records = sa.Table(
    "relaxpack_records", metadata,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("workload_digest", sa.String(64), nullable=False),
    sa.Column("workload_hash", sa.Text, nullable=False),
    sa.Column("bucket", sa.BigInteger, nullable=True),
    sa.Column("target_hash", sa.String(64), nullable=False),
    sa.Column("compiler_hash", sa.String(64), nullable=False),
    sa.Column("status", sa.String(8), nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("content", sa.Text, nullable=False),
    sa.Index("relaxpack_records_key", "workload_hash", "target_hash", "compiler_hash"))


def prepare(connection: sa.Connection, shown: str) -> None:
    """Inside a write transaction: tables and version as this relaxpack writes them. `shown` names the database in errors."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    names = set(sa.inspect(connection).get_table_names())
    if facts.name in names:
        return check_version(connection, shown)
    if names and connection.dialect.name == "sqlite":
        raise DatabaseError(f"{shown} is an SQLite database of something else (tables {', '.join(sorted(names)[:3])}); "
                            "give another path")
    metadata.create_all(connection)
    connection.execute(facts.insert().values(name="schema_version", value=str(SCHEMA_VERSION)))


def check_version(connection: sa.Connection, shown: str) -> None:
    found = connection.execute(sa.select(facts.c.value).where(facts.c.name == "schema_version")).scalar()
    if found is None or not found.isdigit():
        raise DatabaseError(f"{shown} has no readable schema version ({found!r}): not a tuning database, or damaged")
    if int(found) > SCHEMA_VERSION:
        raise NewerDatabaseError(f"{shown} was written by a newer relaxpack (schema {found}, this one knows "
                                 f"{SCHEMA_VERSION}); upgrade relaxpack, or pull its records with a bundle")
