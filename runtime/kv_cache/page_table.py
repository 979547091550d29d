"""`PageTables`: gives sequences their pages, makes pages writable, and gives them back.

It joins the page pool and the prefix cache for the scheduler: attach cached pages, copy shared pages before they are
written, offer computed pages for reuse. Which sequence may have pages is the scheduler's decision; slots and device
tensors are the runner's.
"""

from __future__ import annotations

from relaxpack.runtime.kv_cache.page_pool import PagePool
from relaxpack.runtime.kv_cache.prefix_cache import Hit, PrefixCache, root_digest
from relaxpack.runtime.request import Sequence


class PageTables:
    def __init__(self, pool: PagePool, cache: PrefixCache, page_size: int) -> None:
        self.pool = pool
        self.cache = cache
        self.page_size = page_size
        self._copies: list[tuple[int, int]] = []    # of the step being planned

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies that the planned step must do first. Their sources stay held until `release_sources`."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def release_sources(self, copies: tuple[tuple[int, int], ...]) -> None:
        """The step with these copies is over."""
        for source, _ in copies:
            self.pool.release(source)

    def attach(self, sequence: Sequence, reserve: int = 0, least: int = 1, reuse: bool = True) -> bool:
        """Give a waiting sequence pages for all its tokens, cached ones where its prefix is known, and set `computed`.

        False, and nothing changed, when fewer than `reserve` pages would stay available. At least the last token is
        left to compute, since its logits are wanted; of the prompt at least the last `least` tokens, or none.
        """
        pool, size = self.pool, self.page_size
        hit = self._match(sequence, len(sequence.token_ids) - 1 if reuse else 0)
        if 0 < sequence.num_prompt - self._tokens(hit) < least:
            hit = self._match(sequence, max(0, sequence.num_prompt - least))
        partial = hit.partial
        for page_id in hit.pages:
            pool.share(page_id)
        if partial is not None:
            pool.share(partial[0])
        missing = -(-len(sequence.token_ids) // size) - len(hit.pages)
        if partial is not None and pool.available < missing + reserve:
            pool.release(partial[0])        # without the copy, its source is one more page to take
            partial = None
            while hit.pages and 0 < sequence.num_prompt - len(hit.pages) * size < least:
                pool.release(hit.pages.pop())
                missing += 1
        if pool.available < missing + reserve:
            for page_id in reversed(hit.pages):
                pool.release(page_id)
            return False
        sequence.page_ids = hit.pages + [pool.take() for _ in range(missing)]
        sequence.registered = len(hit.pages)
        sequence.computed = len(hit.pages) * size
        if partial is not None:
            self._copy(partial[0], sequence.page_ids[len(hit.pages)])
            sequence.computed += partial[1]
        return True

    def _match(self, sequence: Sequence, limit: int) -> Hit:
        return self.cache.match(sequence.token_ids, sequence.digests, sequence.request.salt, limit)

    def _tokens(self, hit: Hit) -> int:
        return len(hit.pages) * self.page_size + (hit.partial[1] if hit.partial is not None else 0)

    def _copy(self, source: int, destination: int) -> None:
        """`source` must be held once for this copy, so that nothing overwrites it; that hold ends with the step."""
        self._copies.append((source, destination))

    def make_room(self, sequence: Sequence) -> bool:
        """Let the next token of a running sequence be written: a new page, or its own copy of a shared one.

        False, and nothing changed, when no page is available.
        """
        index = sequence.computed // self.page_size
        if index == len(sequence.page_ids):
            if not self.pool.available:
                return False
            sequence.page_ids.append(self.pool.take())
        elif self._is_shared(sequence.page_ids[index]):
            if not self.pool.available:
                return False
            shared = sequence.page_ids[index]
            page_ids = list(sequence.page_ids)      # a step may still be reading the old list
            page_ids[index] = self.pool.take()
            sequence.page_ids = page_ids
            self._copy(shared, page_ids[index])     # the sequence's hold becomes the copy's
        return True

    def _is_shared(self, page_id: int) -> bool:
        """Whether another sequence reads it: copies do not count, they are done before anything is written."""
        holders = self.pool.holders[page_id]
        return holders > 1 and holders - sum(source == page_id for source, _ in self._copies) > 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` hold all pages of `parent`; whoever writes first gets its own copy."""
        for page_id in parent.page_ids:
            self.pool.share(page_id)
        child.page_ids = list(parent.page_ids)
        child.computed = parent.computed
        child.registered = parent.registered
        child.digests = list(parent.digests)

    def register(self, sequence: Sequence) -> None:
        """Offer the computed full pages of a sequence to the prefix cache."""
        size, token_ids, digests = self.page_size, sequence.token_ids, sequence.digests
        full = sequence.computed // size
        if not self.cache.enabled or full <= sequence.registered:
            return
        self.cache.extend_digests(digests, token_ids, sequence.request.salt, full * size)
        for i in range(sequence.registered, full):
            parent = digests[i - 1] if i else root_digest(sequence.request.salt)
            self.cache.register(sequence.page_ids[i], digests[i], parent, token_ids[i * size:(i + 1) * size])
        sequence.registered = full

    def release(self, sequence: Sequence, computed: bool = True) -> None:
        """Take all pages back. With `computed` false the step in flight failed: only what is registered is trusted."""
        if computed and not self._drop_copies(sequence):
            self._register_rest(sequence)
        for page_id in reversed(sequence.page_ids):     # the tail is evicted first, so chains stay reachable
            self.pool.release(page_id)
        sequence.page_ids = []
        sequence.computed = 0
        sequence.registered = 0

    def _drop_copies(self, sequence: Sequence) -> bool:
        """Forget copies into a sequence that leaves in the very step that admitted it; whether there were any."""
        dropped = [c for c in self._copies if c[1] in sequence.page_ids]
        for copy in dropped:
            self._copies.remove(copy)
            self.pool.release(copy[0])
        return bool(dropped)

    def _register_rest(self, sequence: Sequence) -> None:
        self.register(sequence)
        full = sequence.computed // self.page_size
        rest = sequence.token_ids[full * self.page_size:sequence.computed]
        if rest and self.cache.enabled:
            parent = sequence.digests[full - 1] if full else root_digest(sequence.request.salt)
            self.cache.register_partial(sequence.page_ids[full], parent, rest)
