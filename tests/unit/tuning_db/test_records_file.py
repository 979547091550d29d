"""Exchange bundles: the bytes, and what each kind of damage costs."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaxpack.dist.tuning.records_file import decode, encode, file_name
from relaxpack.errors import DatabaseError, NewerDatabaseError
from relaxpack.tuning_record import canonical, digest
from tests.helpers.tuning_records import SM_80, record

MADE = sorted([record("a"), record("b", us=2.0, target=SM_80), record("c").marked("failed", "wrong numbers")],
              key=lambda one: one.id)
DATA = encode(MADE)
TRAILER = len(DATA.split(b"\n")[-2])


def test_what_is_written_is_read_again() -> None:
    read = decode(DATA, "bundle")
    assert read.records == MADE and read.damaged == []
    assert decode(encode([]), "bundle") == ([], [])


def test_equal_records_give_equal_bytes_whatever_their_order() -> None:
    assert encode([*reversed(MADE), MADE[0]]) == DATA
    assert file_name(DATA) == hashlib.sha256(DATA).hexdigest() + ".jsonl"
    good, failed = record(), record().marked("failed", "x")
    assert encode([good, failed]) == encode([failed])         # one record: the copies are merged


def test_the_lines_are_what_the_documentation_says() -> None:
    header, *lines, trailer, end = DATA.split(b"\n")
    assert json.loads(header) == {"format": "relaxpack tuning records", "version": 1, "count": 3}
    for line, made in zip(lines, MADE, strict=True):
        assert json.loads(line) == {"record": json.loads(canonical(made.to_json())), "sha256": digest(made.to_json())}
    above = DATA[:-len(trailer) - 1]
    assert json.loads(trailer) == {"count": 3, "sha256": hashlib.sha256(above).hexdigest()} and end == b""


@pytest.mark.parametrize(("cut", "whole"), [(2, 3), (40, 3), (TRAILER + 3, 2), (TRAILER + 400, 2)])
def test_a_cut_bundle_keeps_its_whole_lines(cut: int, whole: int) -> None:
    read = decode(DATA[:-cut], "bundle")
    assert read.records == MADE[:whole]
    assert [found.where for found in read.damaged] == [f"bundle:{whole + 2}", "bundle"]
    assert all("cut short" in found.problem for found in read.damaged)
    assert f"3 records announced, {whole} read whole" in read.damaged[-1].problem


def test_a_bundle_cut_between_two_lines_is_cut_all_the_same() -> None:
    for cut in (TRAILER + 1, TRAILER + 2):
        read = decode(DATA[:-cut], "bundle")
        assert read.records == MADE and "cut short" in read.damaged[0].problem


def test_a_flipped_byte_costs_one_record_which_is_named() -> None:
    second = DATA.index(b"\n", DATA.index(b"\n") + 1) + 200
    data = DATA[:second] + bytes([DATA[second] ^ 1]) + DATA[second + 1:]
    read = decode(data, "bundle")
    assert read.records == [MADE[0], MADE[2]]
    assert [found.where for found in read.damaged] == ["bundle:3"]


def test_a_forged_status_does_not_pass() -> None:
    data = DATA.replace(b'"status":"failed"', b'"status":"good"  ').replace(b'"reason":"wrong numbers"', b'"reason":""')
    assert data != DATA
    read = decode(data, "bundle")
    assert len(read.records) == 2 and "the digest of the line is wrong" in read.damaged[0].problem


def test_lines_lost_or_repeated_are_noticed() -> None:
    header, first, second, third, trailer, _ = DATA.split(b"\n")
    lost = decode(b"\n".join([header, first, third, trailer, b""]), "bundle")
    assert lost.records == [MADE[0], MADE[2]] and "the digest of the whole is wrong" in lost.damaged[0].problem
    after = decode(DATA + second + b"\n", "bundle")
    assert after.records == MADE and "after the end" in after.damaged[0].problem
    rewritten = header + b"\n" + first + b"\n"
    trailer = canonical({"count": 1, "sha256": hashlib.sha256(rewritten).hexdigest()}).encode()
    assert "3 records announced, 1 found" in decode(rewritten + trailer + b"\n", "bundle").damaged[0].problem


@pytest.mark.parametrize("bad", [b"{}", b"[1]", b"null", b'{"record":1,"sha256":"x"}', b"\xff\xfe", b"[" * 100000,
                                 b'{"a":NaN}', b'{"record":{},"sha256":"' + digest({}).encode() + b'"}'])
def test_a_hostile_line_is_named_and_the_rest_loads(bad: bytes) -> None:
    header, first, _second, third, trailer, _ = DATA.split(b"\n")
    read = decode(b"\n".join([header, first, bad, third, trailer, b""]), "bundle")
    assert read.records == [MADE[0], MADE[2]]
    assert [found.where for found in read.damaged] == ["bundle:3"] and len(read.damaged[0].problem) < 500


@pytest.mark.parametrize("data", [b"", b"\n", b"hello", b"{}", b"[]", b"SQLite format 3\0",
                                  b'{"format":"other","version":1}'])
def test_something_else_is_no_bundle(data: bytes) -> None:
    with pytest.raises(DatabaseError, match="is no bundle of tuning records"):
        decode(data, "bundle")


def test_a_newer_bundle_is_refused_and_a_strange_header_too() -> None:
    with pytest.raises(NewerDatabaseError, match="version 2, this one reads 1"):
        decode(DATA.replace(b'"version":1', b'"version":2', 1), "bundle")
    for version in (b"0", b'"1"', b"null"):
        with pytest.raises(DatabaseError, match="damaged header"):
            decode(DATA.replace(b'"version":1', b'"version":' + version, 1), "bundle")


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 255), st.booleans())
def test_no_single_change_goes_unnoticed_or_makes_up_a_record(place: int, flip: int, cut: bool) -> None:
    data = DATA[:place] if cut else DATA[:place] + bytes([DATA[place] ^ flip]) + DATA[place + 1:]
    try:
        read = decode(data, "bundle")
    except DatabaseError:
        return
    assert all(found in MADE for found in read.records)
    assert read.damaged or data == DATA[:-1]          # only the last newline is not missed
