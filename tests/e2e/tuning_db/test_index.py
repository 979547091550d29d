"""Two who push at the same moment: whoever writes the index last, both bundles are in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from relaxpack.dist.tuning.place import INDEX, Place
from tests.helpers.exchange_servers import web_server
from tests.helpers.waiting import DEADLINE

A, B = (f"{letter * 64}.jsonl" for letter in "ab")


class Held(Place):
    """Writes the index for the first time when it is let."""

    def __init__(self, url: str, wait: Callable[[float], None]) -> None:
        super().__init__(url, wait)
        self.reached, self.let, self.wrote = threading.Event(), threading.Event(), threading.Event()

    def _put(self, name: str, data: bytes) -> None:
        if name == INDEX and not self.wrote.is_set():
            self.reached.set()
            assert self.let.wait(DEADLINE)
        super()._put(name, data)
        if name == INDEX:
            self.wrote.set()


def write_both(url: str) -> None:
    """B has read the index before A writes it, and writes it after."""
    def settle(seconds: float) -> None:
        assert seconds >= 0.5
        slow.let.set()
        assert slow.wrote.wait(DEADLINE)

    slow = Held(url, lambda seconds: None)
    quick = Place(url, settle)
    thread = threading.Thread(target=slow.write, args=(B, b"b"))
    thread.start()
    try:
        assert slow.reached.wait(DEADLINE)
        quick.write(A, b"a")
    finally:
        slow.let.set()
        thread.join(DEADLINE)
    assert not thread.is_alive()


@pytest.mark.parametrize("without", [(), ("no-listing",)], ids=["lists", "lists nothing"])
def test_on_a_web_server(tmp_path: Path, without: tuple[str, ...]) -> None:
    (tmp_path / "shared").mkdir()
    with web_server(tmp_path, *without) as url:
        write_both(f"{url}/shared")
        assert Place(f"{url}/shared").names() == [A, B]
    assert json.loads((tmp_path / "shared" / INDEX).read_text()) == [A, B]


def test_in_a_folder(tmp_path: Path) -> None:
    write_both(str(tmp_path / "shared"))
    assert json.loads((tmp_path / "shared" / INDEX).read_text()) == [A, B]


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    place.write(A, b"a")
    before = (tmp_path / INDEX).stat().st_mtime_ns
    place.write(A, b"a")
    assert (tmp_path / INDEX).stat().st_mtime_ns == before


def test_nothing_is_left_beside_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    place = Place(str(tmp_path))
    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        place.write(A, b"a")
    assert list(tmp_path.iterdir()) == []
