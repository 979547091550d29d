"""Which tensors share memory: blocks with sizes and lifetimes in, a storage for each block out. Knows no IR.

Compiled kernels take tensors at the start of their storage only, so a plan is a set of storages laid one behind the
other in one arena, and blocks whose lifetimes do not meet take turns in one storage. Blocks are placed largest first
into the smallest free storage that holds them, moving others out of the way; several orders are tried and the smallest
plan wins. `max_live` is what no plan can undercut: the largest sum of blocks alive in one step.
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


def plan_storages(blocks: Sequence[Block], pool: Sequence[int] = (), shuffles: int = _SHUFFLES) -> StoragePlan:
    """Place every block. `pool`: storages that exist already (another function's, never alive at the same time); they
    are used and grown before new ones are made, so that the total over all functions stays small. They come first in
    the plan, in their order."""
    bound = max(max_live(blocks), sum(pool))
    best: StoragePlan | None = None
    for order in _orders(blocks, shuffles):
        found = _place(blocks, order, pool)
        if best is None or found.total < best.total:
            best = found
        if best.total <= bound:
            break
    assert best is not None
    return best


def _orders(blocks: Sequence[Block], shuffles: int) -> list[list[int]]:
    keys: list[Callable[[Block], tuple[int, ...]]] = [
        lambda b: (-b.size, b.first), lambda b: (-b.size, b.first - b.last, b.first), lambda b: (-b.size, -b.first),
        lambda b: (b.first - b.last, -b.size, b.first), lambda b: (b.first, -b.size)]
    orders = [sorted(range(len(blocks)), key=lambda i, key=key: key(blocks[i])) for key in keys]  # type: ignore[misc]
    rng = random.Random(0)
    for _ in range(shuffles):
        noise = [rng.random() for _ in blocks]
        orders.append(sorted(range(len(blocks)), key=lambda i, noise=noise: (-blocks[i].size, noise[i])))  # type: ignore[misc]
    return orders


class _Placement:
    def __init__(self, blocks: Sequence[Block], pool: Sequence[int]) -> None:
        self.blocks = blocks
        self.steps = [block.steps for block in blocks]
        self.sizes, self.busy = list(pool), [0] * len(pool)
        self.storage_of = [-1] * len(blocks)

    def fits(self, index: int, but: int = -1) -> list[int]:
        size = self.blocks[index].size
        return [s for s in range(len(self.sizes))
                if s != but and self.sizes[s] >= size and not self.busy[s] & self.steps[index]]

    def put(self, index: int, storage: int) -> None:
        if (old := self.storage_of[index]) >= 0:
            self.busy[old] &= ~self.steps[index]
        self.busy[storage] |= self.steps[index]
        self.storage_of[index] = storage

    def make_room(self, index: int) -> int | None:
        """A storage for the block after moving what is in its way to other storages; None where that is not possible."""
        for storage, size in sorted(enumerate(self.sizes), key=lambda item: item[1]):
            if size < self.blocks[index].size:
                continue
            in_the_way = [i for i, s in enumerate(self.storage_of) if s == storage and self.steps[i] & self.steps[index]]
            before = list(self.storage_of), list(self.busy)
            for other in in_the_way:
                elsewhere = self.fits(other, storage)
                if not elsewhere:
                    self.storage_of, self.busy = before
                    break
                self.put(other, min(elsewhere, key=lambda s: self.sizes[s]))
            else:
                return storage
        return None


def _place(blocks: Sequence[Block], order: Sequence[int], pool: Sequence[int]) -> StoragePlan:
    p = _Placement(blocks, pool)
    for index in order:
        size = aligned(blocks[index].size)
        fits = p.fits(index)
        chosen = min(fits, key=lambda s: p.sizes[s]) if fits else p.make_room(index)
        if chosen is None:
            free = [s for s in range(len(p.sizes)) if not p.busy[s] & p.steps[index]]
            if not free:
                free = [len(p.sizes)]
                p.sizes.append(size)
                p.busy.append(0)
            chosen = max(free, key=lambda s: p.sizes[s])    # grows least
            p.sizes[chosen] = max(size, p.sizes[chosen])
        p.put(index, chosen)
    return StoragePlan(p.sizes, p.storage_of)
