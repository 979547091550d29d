"""Machine A has tuned; machine B, another user in another folder, builds from what A shared without a trial: the same
kernels, the same bundle, byte for byte. With one fact of its target changed B's build uses no record, and says which fact.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relaxpack.cli.db.common import this_machine
from relaxpack.compile import BuildOptions
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.tuning.store import open_store
from relaxpack.kernel_generations import for_workload
from relaxpack.target import parse_target
from relaxpack.tuning.tasks import extract_tasks
from relaxpack.tuning_record import TuningRecord
from tests.helpers.exchange_servers import web_server
from tests.helpers.tiny_checkpoints import write_checkpoint
from tests.helpers.tuning_records import record

OPTIONS = {"max_context": 128, "max_batch": 4, "prefill_chunk": 32}


def _tuned(checkpoint: Path) -> list[TuningRecord]:
    """A record for every kernel of the model and size that can be tuned, with a choice other than the rule's. Measured times
    would make the choices differ from run to run."""
    target, compiler = this_machine().targets[0]
    records = []
    for task in extract_tasks(checkpoint, parse_target("cpu"), BuildOptions(**OPTIONS)):
        choice = next(task.part.space.all(), None) if task.part is not None else None
        if choice is not None:
            facts = for_workload(compiler, task.workload)
            records.append(replace(record(target=target, compiler=facts, bucket=task.bucket, parameters=choice),
                                   workload=task.workload))
    return records


class User:
    """Runs `relaxpack` with a home and a checkpoint of their own."""

    def __init__(self, home: Path, checkpoint: Path) -> None:
        self.home = home
        shutil.copytree(checkpoint, home / "checkpoint")

    @property
    def database(self) -> str:
        return str(self.home / ".local/share/relaxpack/tuning.sqlite")

    def run(self, *arguments: str, **environment: str) -> Any:
        unset = ("XDG_DATA_HOME", "RELAXPACK_TUNING_DB", "RELAXPACK_NUM_THREADS")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        done = subprocess.run([sys.executable, "-m", "relaxpack", *arguments, "--json"], cwd=self.home, text=True,
                              capture_output=True, check=False, stdin=subprocess.DEVNULL,
                              env={**inherited, "HOME": str(self.home), "PYTHONPATH": os.getcwd(), **environment})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def build(self, name: str, *databases: str, **environment: str) -> Path:
        options = [f"--{option.replace('_', '-')}={value}" for option, value in OPTIONS.items()]
        self.run("build", "checkpoint", "-o", name, *options, *(f"--db={database}" for database in databases), **environment)
        return self.home / name


def _tuning(bundle: Path) -> tuple[dict[str, int], tuple[str, ...], dict[str, Any]]:
    with Bundle.open(bundle) as opened:
        entry = opened.manifest.targets[0]
        return dict(entry.kernels), tuple(entry.tuning_records), _explanation(opened)["tuning"]


def _explanation(bundle: Bundle) -> Any:
    name = next(member for member in bundle.manifest.members if member.endswith("explain.json"))
    return bundle.read_json(name)


@pytest.fixture
def user(tmp_path: Path) -> Callable[[str], User]:
    write_checkpoint(tmp_path / "checkpoint")
    return lambda name: User(tmp_path / name, tmp_path / "checkpoint")


@pytest.mark.slow
def test_b_builds_what_a_builds(user: Callable[[str], User], tmp_path: Path, postgresql_database: str) -> None:
    a, b = user("a"), user("b")
    records = _tuned(tmp_path / "checkpoint")
    with open_store(a.database) as store:
        store.add_all(records)
    built = a.build("a.bundle", a.database)
    kernels, used, told = _tuning(built)
    assert kernels["tuned"] >= 10 and set(used) == set(told["used"]) <= {one.id for one in records}
    assert told["rejected"] == []

    a.run("db", "push", postgresql_database)
    (tmp_path / "served").mkdir()
    with web_server(tmp_path / "served") as address:
        a.run("db", "push", f"{address}/tuning")
        assert b.run("db", "pull", f"{address}/tuning")["usable_here"] == len(records)
    for name, database in (("pulled.bundle", b.database), ("team.bundle", postgresql_database)):
        assert _digests(b.build(name, database)) == _digests(built), name

    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core, there is no other number of threads")
    threads = this_machine().targets[0][0]["threads"]
    changed = b.build("changed.bundle", b.database, RELAXPACK_NUM_THREADS="1")
    kernels, used, told = _tuning(changed)
    assert kernels.get("tuned", 0) == 0 and used == () and told["used"] == {}
    assert told["rejected"]
    assert {one["reason"] for one in told["rejected"]} == {f"another target: threads 1 here, {threads} there"}
    assert {one["record"] for one in told["rejected"]} <= {one.id for one in records}


def _digests(bundle: Path) -> dict[str, str]:
    with Bundle.open(bundle) as opened:
        members = {name: member.sha256 for name, member in opened.manifest.members.items()}
        return members | {"manifest.json": str(opened.manifest.to_bytes())}
