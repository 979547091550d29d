"""`PagePool`: every page of the KV cache and how many sequences hold it.

A page is free (no holder, nothing worth keeping), held (one holder or more) or cached (no holder, kept for the prefix
cache, evicted least recently used first). The pool knows ids only: no tokens, no tensors. Page 0 is scratch and is
never handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class PagePool:
    def __init__(self, num_pages: int) -> None:
        """`num_pages` counts the scratch page, as the runner does."""
        if num_pages < 2:
            raise ValueError(f"a page pool needs the scratch page and at least one more, got {num_pages}")
        self.num_pages = num_pages
        self.holders: list[int] = [0] * num_pages               # read by the scheduler; changed only here
        self._free: list[int] = list(range(num_pages - 1, 0, -1))   # a stack: page 1 first, then the last returned
        self._kept: set[int] = set()                            # pages to cache instead of freeing at the last release
        self._cached: OrderedDict[int, None] = OrderedDict()    # least recently used first
        self.on_evict: Callable[[int], None] = lambda page_id: None
        self.evictions = 0

    @property
    def total(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.total - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Pages that `take` can hand out now: free ones and cached ones, which it would evict."""
        return len(self._free) + len(self._cached)

    def take(self) -> int:
        """Hold a page nobody holds; evicts the least recently used cached page when none is free."""
        if self._free:
            page_id = self._free.pop()
        else:
            page_id, _ = self._cached.popitem(last=False)
            self._kept.discard(page_id)
            self.evictions += 1
            self.on_evict(page_id)
        self.holders[page_id] = 1
        return page_id

    def share(self, page_id: int) -> None:
        """Hold one time more a page that is held or cached."""
        if self.holders[page_id] == 0:
            del self._cached[page_id]       # KeyError: nobody may share a free page
        self.holders[page_id] += 1

    def release(self, page_id: int) -> None:
        """Give up one hold; at the last one the page becomes the most recently used cached page, or free."""
        assert self.holders[page_id] > 0, f"page {page_id} is released but nobody holds it"
        self.holders[page_id] -= 1
        if self.holders[page_id] == 0:
            if page_id in self._kept:
                self._cached[page_id] = None
            else:
                self._free.append(page_id)

    def keep(self, page_id: int) -> None:
        """Mark a held page: at its last release it is cached, not freed."""
        assert self.holders[page_id] > 0, f"page {page_id} must be held to be kept"
        self._kept.add(page_id)

    def forget(self, page_id: int) -> None:
        """Undo `keep`; a cached page becomes free at once."""
        self._kept.discard(page_id)
        if page_id in self._cached:
            del self._cached[page_id]
            self._free.append(page_id)

    def cached_pages(self) -> list[int]:
        """Least recently used first."""
        return list(self._cached)

    def check(self) -> None:
        """Assert the invariants: every page but scratch is exactly one of free, held, cached."""
        free, cached = set(self._free), set(self._cached)
        held = {p for p in range(1, self.num_pages) if self.holders[p] > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert self.holders[0] == 0 and 0 not in free | cached, "the scratch page is in use"
        assert not (free & held or cached & held or free & cached), (free & held, cached & held, free & cached)
        assert len(free) + len(held) + len(cached) == self.total, (len(free), len(held), len(cached), self.total)
        assert cached <= self._kept <= cached | held, "kept pages must be held or cached"
        assert min(self.holders) >= 0, "a page has fewer than no holders"
