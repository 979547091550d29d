"""The integer inputs of a step: where each lies in one flat int32 buffer, and how a step plan fills them.

One buffer means one copy to a device per step. Views start at multiples of 64 bytes. Knows shapes and slots, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relaxpack.model_info import ModelInfo
from relaxpack.runtime.step_plan import SequenceStep

_ALIGN = 16  # int32 elements: 64 bytes

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class InputLayout:
    """Names and shapes in the order of the function's parameters, and their offsets (in elements)."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    size: int

    def views(self, buffer: np.ndarray) -> Arrays:
        """Named views of a flat int32 buffer of at least `size` elements."""
        return {name: buffer[start:start + int(np.prod(shape))].reshape(shape)
                for name, shape, start in zip(self.names, self.shapes, self.offsets, strict=True)}


def _layout(entries: Sequence[tuple[str, tuple[int, ...]]]) -> InputLayout:
    offsets, end = [], 0
    for _, shape in entries:
        offsets.append(end)
        end += -(-int(np.prod(shape)) // _ALIGN) * _ALIGN
    return InputLayout(tuple(n for n, _ in entries), tuple(s for _, s in entries), tuple(offsets), end)


def decode_layout(batch: int, info: ModelInfo, device_sampling: bool = False, shared: bool = False) -> InputLayout:
    """`shared`: with the input of that name, how many leading keys a row has in common with others."""
    rows: list[tuple[str, tuple[int, ...]]] = [
        (name, (batch,)) for name in ("token_ids", "positions", "slots", "lengths")]
    sampling = [("token_source", (batch,)), *_sampling(batch)] if device_sampling else []
    spread = [("shared", (batch,))] if shared else []
    return _layout([*rows, ("page_table", (batch, info.max_pages_per_sequence)), *sampling, *spread])


def sampling_layout(rows: int, info: ModelInfo) -> InputLayout:
    """`allowed` stands last, so that an upload may end behind the masks that are used."""
    return _layout([*_sampling(rows), ("allowed", (rows, -(-info.vocab_size // 32)))])


def _sampling(rows: int) -> list[tuple[str, tuple[int, ...]]]:
    """`settings` holds float32; its views are reinterpreted."""
    return [("settings", (rows, 8)), ("counters", (rows, 8))]


def prefill_layout(tokens: int, sequences: int, logit_rows: int, info: ModelInfo) -> InputLayout:
    return _layout([("token_ids", (tokens,)), ("positions", (tokens,)), ("slots", (tokens,)),
                    ("query_start", (sequences + 1,)), ("lengths", (sequences,)),
                    ("page_table", (sequences, info.max_pages_per_sequence)), ("logit_rows", (logit_rows,))])


def is_decode(sequences: Sequence[SequenceStep]) -> bool:
    """One token each, and every one wants its logits."""
    return all(len(s.token_ids) == 1 and len(s.logit_offsets) == 1 for s in sequences)


def fill_decode(arrays: Arrays, sequences: Sequence[SequenceStep], page_size: int) -> None:
    """Rows beyond the sequences are padding: one token at the scratch page."""
    token_ids, positions, slots = arrays["token_ids"], arrays["positions"], arrays["slots"]
    lengths, page_table = arrays["lengths"], arrays["page_table"]
    for i, s in enumerate(sequences):
        start = s.start
        token_ids[i] = s.token_ids[0]
        positions[i] = start
        lengths[i] = start + 1
        used = start // page_size + 1
        slots[i] = s.page_ids[used - 1] * page_size + start % page_size
        page_table[i, :used] = s.page_ids[:used]
    padding = slice(len(sequences), len(token_ids))
    token_ids[padding] = positions[padding] = slots[padding] = 0
    lengths[padding] = 1
    page_table[padding, 0] = 0


def fill_prefill(arrays: Arrays, sequences: Sequence[SequenceStep], page_size: int) -> None:
    """Rows of all sequences one behind the other, int32; what `arrays` has room for beyond them is padding."""
    page_table, query_start = arrays["page_table"], arrays["query_start"]
    query_start[0] = 0
    rows: list[int] = []
    for i, s in enumerate(sequences):
        first = int(query_start[i])
        count = len(s.token_ids)
        part = slice(first, first + count)
        query_start[i + 1] = first + count
        arrays["token_ids"][part] = s.token_ids
        where = np.arange(s.start, s.start + count)
        arrays["positions"][part] = where
        arrays["lengths"][i] = s.start + count
        used = -(-(s.start + count) // page_size)
        page_table[i, :used] = s.page_ids[:used]
        arrays["slots"][part] = page_table[i, where // page_size] * page_size + where % page_size
        rows += [first + offset for offset in s.logit_offsets]
    padding = slice(int(query_start[len(sequences)]), None)  # rows of no sequence: they write to the scratch page
    for name in ("token_ids", "positions", "slots"):
        arrays[name][padding] = 0
    # A chunk that wants no logits still has one row: functions have no results of size zero.
    arrays["logit_rows"][:] = rows or [0]


def count_logit_rows(sequences: Sequence[SequenceStep]) -> int:
    return sum(len(s.logit_offsets) for s in sequences)
