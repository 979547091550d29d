"""Which tensors share memory: blocks with sizes and lifetimes in, a storage for each block out. Knows no IR.

Compiled kernels take tensors at the start of their storage only, so a plan is a set of storages laid one behind the
other in one arena, and blocks whose lifetimes do not meet take turns in one storage. Blocks are placed largest first
into the smallest free storage that holds them; several orders are tried and the smallest plan wins. `max_live` is what
no plan can undercut: the largest sum of blocks alive in one step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ALIGNMENT = 256
_SHUFFLES = 24      # seeded orders tried where the fixed ones miss the lower bound


@dataclass(frozen=True)
class Block:
    """`size` bytes, alive in the steps `first` to `last`, both included."""

    size: int
    first: int
    last: int

    @property
    def steps(self) -> int:
        """Bit i is set where the block is alive in step i."""
        return ((1 << (self.last - self.first + 1)) - 1) << self.first


@dataclass
class StoragePlan:
    """`storages`: bytes of each; `storage_of[i]`: the storage of block i."""

    storages: list[int] = field(default_factory=list)
    storage_of: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.storages)

    def offsets(self) -> list[int]:
        """Where each storage starts in the arena."""
        return [sum(self.storages[:i]) for i in range(len(self.storages))]


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def max_live(blocks: Sequence[Block]) -> int:
    """The lower bound of any plan, in aligned bytes."""
    changes: dict[int, int] = {}
    for block in blocks:
        changes[block.first] = changes.get(block.first, 0) + aligned(block.size)
        changes[block.last + 1] = changes.get(block.last + 1, 0) - aligned(block.size)
    live = most = 0
    for step in sorted(changes):
        live += changes[step]
        most = max(most, live)
    return most


def plan_storages(blocks: Sequence[Block], pool: Sequence[int] = ()) -> StoragePlan:
    """Place every block. `pool`: storages that exist already (another function's, never alive at the same time); they
    are used and grown before new ones are made, so that the total over all functions stays small. They come first in
    the plan, in their order."""
    bound = max(max_live(blocks), sum(pool))
    best: StoragePlan | None = None
    for order in _orders(blocks):
        found = _place(blocks, order, pool)
        if best is None or found.total < best.total:
            best = found
        if best.total <= bound:
            break
    assert best is not None
    return best


def _orders(blocks: Sequence[Block]) -> list[list[int]]:
    keys: list[Callable[[Block], tuple[int, ...]]] = [
        lambda b: (-b.size, b.first), lambda b: (-b.size, b.first - b.last, b.first), lambda b: (-b.size, -b.first),
        lambda b: (b.first - b.last, -b.size, b.first), lambda b: (b.first, -b.size)]
    orders = [sorted(range(len(blocks)), key=lambda i, key=key: key(blocks[i])) for key in keys]  # type: ignore[misc]
    rng = random.Random(0)
    for _ in range(_SHUFFLES):
        noise = [rng.random() for _ in blocks]
        orders.append(sorted(range(len(blocks)), key=lambda i, noise=noise: (-blocks[i].size, noise[i])))  # type: ignore[misc]
    return orders


def _place(blocks: Sequence[Block], order: Sequence[int], pool: Sequence[int]) -> StoragePlan:
    sizes, busy = list(pool), [0] * len(pool)
    storage_of = [-1] * len(blocks)
    for index in order:
        size, steps = aligned(blocks[index].size), blocks[index].steps
        free = [s for s in range(len(sizes)) if not busy[s] & steps]
        if fits := [s for s in free if sizes[s] >= size]:
            chosen = min(fits, key=lambda s: sizes[s])
        elif free:
            chosen = max(free, key=lambda s: sizes[s])    # grows least
            sizes[chosen] = size
        else:
            chosen = len(sizes)
            sizes.append(size)
            busy.append(0)
        busy[chosen] |= steps
        storage_of[index] = chosen
    return StoragePlan(sizes, storage_of)
