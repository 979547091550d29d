"""The storages that graphs share, and what functions without graphs take beside them."""

from __future__ import annotations

from typing import Any

from relaxpack.compile.storage_summary import storage_summary


def plan(*storages: int, captured: bool = True, result: int = 0) -> dict[str, Any]:
    return {"storages": list(storages), "captured": captured, "result_bytes": result}


def test_graphs_share_storages_by_rank() -> None:
    found = storage_summary({"decode_1": plan(10, 300), "decode_2": plan(200, 20, 5)})
    assert found == {"arena_storages": [300, 20, 5], "eager_bytes": 0}


def test_eager_functions_reuse_what_has_the_same_size() -> None:
    found = storage_summary({"decode_1": plan(8), "prefill": plan(4, 4, 2, captured=False, result=100),
                             "decode": plan(4, 7, captured=False, result=10)})
    assert found == {"arena_storages": [8], "eager_bytes": 4 + 4 + 2 + 7 + 110}


def test_without_graphs_there_is_nothing_to_say() -> None:
    assert storage_summary({"decode": plan(4, captured=False)}) == {}
