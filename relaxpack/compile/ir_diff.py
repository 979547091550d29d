"""What a pass changed in a function, as a diff of its TVMScript that one can read: renamed variables are no change, and
changes that repeat layer by layer are shown once with their count. Works on text alone.

A function is its parameters and bindings, a line each. Lines are aligned with the names of local variables masked; two
aligned lines are the same if their operands are (a variable that keeps its name while its value changes is the same
operand). A hunk is a run of changed lines with one line around it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

MOST_HUNKS, MOST_LINES = 24, 60     # of a function, of a hunk; what is left off is counted
MOST_PERIOD = 48                    # lines that may repeat within a hunk
_TENSOR = re.compile(r'R\.Tensor\(\(([^()]*)\), dtype="(\w+)"\)')
_NAME = re.compile(r"\b[A-Za-z_]\w*")
_DEFINED = re.compile(r"(\w+)(?::| =)")
_NOISE = re.compile(r"# |@|from |\w+ = TypeVar\(|with R\.dataflow\(\):$|R\.output\(|R\.func_attr\(")


@dataclass(frozen=True)
class Line:
    text: str
    defines: str | None                       # a local variable
    operands: tuple[str, ...] = ()            # local variables, in order
    key: str = ""                             # the text with local variables masked

    @property
    def shape(self) -> str:
        """The key with numbers masked: what is equal from layer to layer."""
        return re.sub(r"\d+", "#", self.key)


@dataclass
class Hunk:
    """`lines` start with "  ", "- " or "+ ". `count`: how often it is there, up to names and numbers."""

    lines: list[str]
    count: int = 1
    left_off: int = 0                         # lines beyond MOST_LINES

    def to_json(self) -> dict[str, Any]:
        return {"lines": self.lines, "count": self.count, "left_off": self.left_off}


@dataclass
class FunctionDiff:
    hunks: list[Hunk] = field(default_factory=list)
    removed: int = 0
    added: int = 0
    left_off: int = 0                         # kinds of hunks beyond MOST_HUNKS

    def to_json(self) -> dict[str, Any]:
        return {"hunks": [h.to_json() for h in self.hunks], "removed": self.removed, "added": self.added,
                "left_off": self.left_off}


def function_lines(script: str) -> list[Line]:
    """The lines of one function in TVMScript."""
    texts: list[str] = []
    for raw in _TENSOR.sub(lambda m: f"{m[2]}[{m[1].rstrip(',')}]", script).splitlines():
        text = raw.strip()
        if text.startswith("def "):
            inside = text[text.index("(") + 1:].rsplit(") ->", 1)[0].removesuffix("):")
            texts += [f"parameter {p}" for p in re.split(r", (?=\w+: )", inside)]
        elif text and not _NOISE.match(text):
            texts.append(text)
    return _masked(texts)


def _masked(texts: list[str]) -> list[Line]:
    known: set[str] = set()
    lines = []
    for text in texts:
        defined = None if text.startswith("parameter ") else _DEFINED.match(text)
        body = text[defined.end():] if defined else text
        operands = tuple(name for name in _NAME.findall(body) if name in known)
        key = _NAME.sub(lambda m: "%" if m[0] in known else m[0], body)
        lines.append(Line(text, defined[1] if defined else None, operands, key))
        if defined:
            known.add(defined[1])
    return lines


def diff(before: list[Line], after: list[Line]) -> FunctionDiff:
    """How to get from one function to the other."""
    found = FunctionDiff()
    groups: dict[str, Hunk] = {}
    for hunk, signature, removed, added in _hunks(before, after):
        found.removed, found.added = found.removed + removed, found.added + added
        if signature in groups:
            groups[signature].count += 1
        else:
            groups[signature] = hunk
    found.hunks = list(groups.values())[:MOST_HUNKS]
    found.left_off = len(groups) - len(found.hunks)
    return found


def _changes(before: list[Line], after: list[Line]) -> Iterator[tuple[list[Line], list[Line], int]]:
    """(old lines, new lines, where in `after`): both empty lists for a line that stays."""
    same: dict[str, str] = {}                 # local variable before → after
    for equal, a, b, c, d in _aligned([line.key for line in before], [line.key for line in after]):
        if not equal:
            kept = {line.defines for line in before[a:b]} & {line.defines for line in after[c:d]}
            same |= {name: name for name in kept if name is not None}
            yield before[a:b], after[c:d], c
            continue
        for where, (old, new) in enumerate(zip(before[a:b], after[c:d], strict=True), c):
            if tuple(same.get(name, "") for name in old.operands) != new.operands:
                yield [old], [new], where
            else:
                yield [], [], where
            if old.defines is not None and new.defines is not None:
                same[old.defines] = new.defines


def _aligned(before: list[str], after: list[str]) -> Iterator[tuple[bool, int, int, int, int]]:
    """(equal, a, b, c, d): before[a:b] stands where after[c:d] does. Lines that are there once on both sides come first
    (most name a parameter), what lies between them is small."""
    a = c = 0
    for i, j in [*_anchors(before, after), (len(before), len(after))]:
        matcher = SequenceMatcher(None, before[a:i], after[c:j], autojunk=False)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes():
            yield tag == "equal", a + i1, a + i2, c + j1, c + j2
        if i < len(before):
            yield True, i, i + 1, j, j + 1
        a, c = i + 1, j + 1


def _anchors(before: list[str], after: list[str]) -> list[tuple[int, int]]:
    """The longest list of pairs of lines, rising on both sides, that are equal and there once."""
    once = {key for key, count in Counter(before).items() if count == 1} & {
        key for key, count in Counter(after).items() if count == 1}
    place = {key: j for j, key in enumerate(after) if key in once}
    tails: list[int] = []                             # smallest end of a rising run of each length
    links: list[tuple[int, int, Any]] = []            # (i, j, link before it) of each such run
    for i, key in enumerate(before):
        if key in once:
            j = place[key]
            at = bisect_left(tails, j)
            tails[at:at + 1] = [j]
            links[at:at + 1] = [(i, j, links[at - 1] if at else None)]
    found, link = [], links[-1] if links else None
    while link is not None:
        found.append(link[:2])
        link = link[2]
    return found[::-1]


def _hunks(before: list[Line], after: list[Line]) -> Iterator[tuple[Hunk, str, int, int]]:
    """(hunk, signature, lines removed, lines added)."""
    old: list[Line] = []
    new: list[Line] = []
    start = 0

    def close() -> tuple[Hunk, str, int, int]:
        end = start + len(new)
        lines = [*collapsed("- ", old), *collapsed("+ ", new)]
        signature = "\n".join([*("-" + line.shape for line in old), *("+" + line.shape for line in new)])
        around = [[f"  {after[i].text}"] if 0 <= i < len(after) else [] for i in (start - 1, end)]
        shown = lines[:MOST_LINES]
        return (Hunk([*around[0], *shown, *around[1]], left_off=len(lines) - len(shown)), signature, len(old), len(new))

    for removed, added, at in _changes(before, after):
        if removed or added:
            start = start if old or new else at
            old, new = old + removed, new + added
        elif old or new:
            yield close()
            old, new = [], []
    if old or new:
        yield close()


def collapsed(mark: str, lines: list[Line]) -> list[str]:
    """The lines with a mark before each; blocks that repeat up to names and numbers are there once and counted."""
    shapes = [line.shape for line in lines]
    found: list[str] = []
    at = 0
    while at < len(lines):
        period, times = max(((p, _repeats(shapes, at, p)) for p in range(1, min(MOST_PERIOD, len(lines) - at) + 1)),
                            key=lambda both: (both[0] * (both[1] - 1), -both[0]))
        if period * (times - 1) < 4:
            period, times = 1, 1
        found += [mark + line.text for line in lines[at:at + period]]
        if times > 1:
            found.append(f"{mark}… and {times - 1} times more, but for names and numbers")
        at += period * times
    return found


def _repeats(shapes: list[str], at: int, period: int) -> int:
    """How often the block of `period` lines at `at` follows itself, itself included."""
    times = 1
    while shapes[at:at + period] == shapes[at + times * period:at + (times + 1) * period]:
        times += 1
    return times
