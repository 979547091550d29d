"""Run as a program: five processes add batches of records that share workloads, in orders of their own, while a sixth
removes records and with them workloads that the others are about to use. Prints whether all that is left is whole.

    python tuning_crowd.py LOCATION ROUNDS
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Callable

from relaxpack.dist.tuning.store import open_store
from tests.helpers.tuning_records import record

WRITERS, WORKLOADS = 5, 12


def add(location: str, writer: int, rounds: int) -> None:
    draw = random.Random(writer)
    with open_store(location) as store:
        for number in range(rounds):
            names = draw.sample(range(WORKLOADS), 8)
            batch = [record(f"workload {name}", seed=(writer * 1000 + number) * 100 + name) for name in names]
            known = record(f"workload {names[0]}", us=3.0)          # everybody's: added, marked and removed all the time
            assert store.add_all([*batch, known.marked("stale", f"writer {writer}") if number % 2 else known]) >= len(batch)
            store.remove([batch[0].id])


def remove(location: str, rounds: int) -> None:
    with open_store(location) as store:
        for _ in range(rounds):
            store.remove([made.id for made in store.all()])


def main(location: str, rounds: int) -> None:
    open_store(location).close()
    children = [_forked(lambda writer=writer: add(location, writer, rounds)) for writer in range(WRITERS)]
    children.append(_forked(lambda: remove(location, rounds)))
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children), "a process failed"
    with open_store(location) as store:
        print(len(list(store.all())) == len(store), store.damaged())


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
