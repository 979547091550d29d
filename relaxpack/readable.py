"""Numbers in units that people read, and text that cannot steer a terminal."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """Decimal units, three digits: 1536 → "1.54 kB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def printable(text: str) -> str:
    """Without control characters, which could steer the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
