"""Run as a program: eight processes write to one store while a ninth reads it and a tenth is killed with SIGKILL ten times.
Prints one JSON object: what each writer was told is stored, and what the reader saw.

    python tuning_writers.py LOCATION RECORDS_PER_WRITER

The processes are forked after the imports, which takes the ten starts of the victim from half a minute to nothing.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import IO

from relaxpack.dist.tuning.store import open_store
from relaxpack.tuning_record import TuningRecord
from tests.helpers.tuning_records import record

WRITERS, KILLS, SHARED = 8, 10, 5


def own(writer: int, number: int) -> TuningRecord:
    """A record with a long workload, so that it is written in several pages."""
    return record(f"kernel {writer}-{number} " + "x" * 20000, us=1.0 + number, seed=writer * 100000 + number)


def shared(number: int) -> TuningRecord:
    return record(f"shared {number}", us=5.0)


def write(location: str, writer: int, count: int, told: IO[str]) -> None:
    with open_store(location) as store:
        for number in range(count):
            made = own(writer, number)
            assert store.add(made)
            print(made.id, file=told, flush=True)
            store.add(shared(number % SHARED))
            store.mark(shared(number % SHARED).id, "failed" if writer % 2 else "stale", f"writer {writer % 3}")


def write_until_killed(location: str, life: int, told: IO[str]) -> None:
    with open_store(location) as store:
        number = 0
        while True:
            made = own(1000 + life, number)
            store.add(made)
            print(made.id, file=told, flush=True)
            number += 1


def read(location: str, stop: int, told: IO[str]) -> None:
    seen, rounds, last = 0, 0, False
    with open_store(location) as store:
        while not last:
            last = bool(select.select([stop], [], [], 0)[0])     # closed: everybody has written
            found = {made.id for made in store.all()}
            assert len(found) >= seen, f"{seen} records, then {len(found)}"
            assert not store.damaged()
            seen, rounds = len(found), rounds + 1
            if rounds == 1:
                print("reading", file=told, flush=True)
    print(json.dumps({"rounds": rounds, "seen": seen}), file=told, flush=True)


class Child:
    def __init__(self, work: Callable[..., None], *args: object) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            try:
                with os.fdopen(writing, "w") as told:
                    work(*args, told)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writing)
        self.told = os.fdopen(reading)

    def lines(self) -> Iterator[str]:
        for line in self.told:
            if line.endswith("\n"):          # a killed writer may leave half a line
                yield line.strip()

    def finish(self) -> list[str]:
        found = list(self.lines())
        _, status = os.waitpid(self.pid, 0)
        assert status == 0, f"a process ended with status {status}"
        return found


def main(location: str, count: int) -> None:
    open_store(location).close()
    stop, stopping = os.pipe()
    reader = _reader(location, stop, stopping)
    assert next(reader.lines()) == "reading"
    writers = [Child(write, location, number, count) for number in range(WRITERS)]
    lives = []
    draw = random.Random(0)
    for life in range(KILLS):
        victim, enough = Child(write_until_killed, location, life), draw.randint(1, 6)
        acknowledged = []
        for line in victim.lines():
            acknowledged.append(line)
            if len(acknowledged) == enough:
                os.kill(victim.pid, signal.SIGKILL)
        os.waitpid(victim.pid, 0)
        lives.append(acknowledged)
    acknowledged_by = [writer.finish() for writer in writers]
    os.close(stopping)
    saw = json.loads(reader.finish()[0])
    print(json.dumps({"acknowledged": acknowledged_by, "killed": lives, "reader": saw}))


def _reader(location: str, stop: int, stopping: int) -> Child:
    """Forked first, and the only one that must not hold the end whose closing stops it."""
    def work(told: IO[str]) -> None:
        os.close(stopping)
        read(location, stop, told)

    return Child(work)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
