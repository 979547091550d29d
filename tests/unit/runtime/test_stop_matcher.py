"""Stop strings: nothing of a stop is sent, nothing else is held longer than needed, whatever the split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaxpack.errors import RequestError
from relaxpack.runtime.stop_matcher import StopMatcher


def stream(stops, pieces):
    matcher = StopMatcher(stops)
    sent = [matcher.add(piece) for piece in pieces]
    return sent, "".join(sent) + matcher.finish(), matcher.matched


def reference(stops, text):
    """The stop that is complete first, the longest of those; by trying every end."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            stop = max(ended, key=len)
            return text[:end - len(stop)], stop
    return text, None


def test_alphabet_case():
    sent, text, matched = stream(["DEFGHIJ"], [" D", "E", "F", "G", "H", "I", "JKL"])
    assert (text, matched) == (" ", "DEFGHIJ")
    assert sent == [" ", "", "", "", "", "", ""]


def test_stop_inside_one_piece():
    assert stream(["own fox"], ["The quick brown fox jumps"])[1:] == ("The quick br", "own fox")


def test_self_overlapping_stop():
    assert stream(["aab"], list("aaab"))[1:] == ("a", "aab")


def test_no_stop_releases_everything_as_soon_as_it_is_certain():
    sent, text, matched = stream(["abcx"], ["ab", "cd", "a"])
    assert sent == ["", "abcd", ""] and text == "abcda" and matched is None


def test_shorter_stop_inside_a_longer_one_wins_by_being_complete_first():
    assert stream(["abcd", "bc"], list("xabcd"))[1:] == ("xa", "bc")


def test_longest_of_stops_ending_together():
    assert stream(["c", "abc"], ["xxabc"])[1:] == ("xx", "abc")


def test_four_stops():
    assert stream(["\n\n", "User:", "###", "END"], ["Hi\n", "the EN", "gine", "\n##", "# x"])[1:] == \
        ("Hi\nthe ENgine\n", "###")


def test_kilobyte_stop():
    stop = "ab" * 512
    text = "ab" * 700
    _sent, out, matched = stream([stop], [text[i:i + 3] for i in range(0, len(text), 3)])
    assert (out, matched) == ("", stop)
    almost = "ab" * 511 + "a"
    assert stream([stop], [almost, "c"])[1:] == (almost + "c", None)


def test_after_a_match_everything_is_swallowed():
    matcher = StopMatcher("x")
    assert matcher.add("ax") == "a" and matcher.add("more") == "" and matcher.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [3]])
def test_empty_or_foreign_stop_is_refused(stops):
    with pytest.raises(RequestError, match="non-empty") as caught:
        StopMatcher(stops)
    assert caught.value.param == "stop"


def test_without_stops_text_passes():
    assert stream([], ["a", "b"]) == (["a", "b"], "ab", None)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
       st.lists(st.text("abc", max_size=4), max_size=12))
def test_equals_the_reference_for_every_split(stops, pieces):
    text, stop = reference(stops, "".join(pieces))
    matcher, sent = StopMatcher(stops), ""
    for n, piece in enumerate(pieces):
        sent += matcher.add(piece)
        if matcher.matched is None:
            held = "".join(pieces[:n + 1])[len(sent):]
            assert held == "" or any(s.startswith(held) and s != held for s in stops)
    assert (sent + matcher.finish(), matcher.matched) == (text, stop)
