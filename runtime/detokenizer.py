"""Token ids to text as they arrive: `TokenBytes` (the bytes of each id) and `Detokenizer` (one output
stream).

Works on bytes, so a character split over tokens is held until it is whole and every piece is valid UTF-8.
Bytes that are no character are dropped, in the middle and at the end alike. Stop strings are
`stop_matcher.py`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from relaxpack.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100
    onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + n): b for n, b in enumerate(others)}}


class TokenBytes:
    """`token_bytes[id]` → bytes, by the decoder section of tokenizer.json. Ids without a token give b"".

    `strip_start`: leading spaces of a whole text that the decoder removes (SentencePiece puts one in front);
    `strip_first_token`: Metaspace removes every space of the first token instead.
    """

    def __init__(self, vocabulary: Mapping[int, str], decoder: Mapping[str, Any] | None) -> None:
        self._vocabulary = vocabulary
        self._byte_level = self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.strip_start = 0
        self.strip_first_token = False
        for step in self._steps(decoder):
            self._read_step(step)
        self._cache: dict[int, bytes] = {}

    @staticmethod
    def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
        if decoder is None:
            return []
        return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]

    def _read_step(self, step: Mapping[str, Any]) -> None:
        kind = step["type"]
        if kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in step["pattern"]:
            self._replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            self._replacements.append((step.get("replacement", "▁"), " "))
            self.strip_first_token = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step["content"] == " " and step.get("stop", 0) == 0:
            self.strip_start = step["start"]
        elif kind != "Fuse":
            raise TokenizerError(f"tokenizer.json has a decoder step that relaxpack cannot stream: "
                                 f"{dict(step)}; known are ByteLevel, ByteFallback, Replace (plain string), "
                                 "Metaspace, Fuse and Strip of leading spaces")

    def __getitem__(self, token_id: int) -> bytes:
        found = self._cache.get(token_id)
        if found is None:
            found = self._cache[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._vocabulary.get(token_id, "")
        if self._byte_level:
            alphabet = byte_level_alphabet()
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            return token.encode("utf-8", errors="ignore")
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        return bytes([int(byte[1], 16)]) if byte else token.encode("utf-8", errors="ignore")


class Detokenizer:
    """One output stream: `add(ids)` gives the text that became certain, `finish()` the rest.

    `skip`: ids that have no text (special tokens). `continuation`: the stream goes on after a prompt, so the
    decoder's rule about leading spaces does not apply.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip: frozenset[int] = frozenset(),
                 continuation: bool = False) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._to_strip = 0 if continuation else token_bytes.strip_start
        self._first_token = token_bytes.strip_first_token and not continuation

    def add(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; the bytes of an unfinished character wait for the next ones."""
        raw = bytearray()
        for token_id in ids:
            if token_id in self._skip:
                continue
            piece = self._token_bytes[token_id]
            if self._first_token:
                piece = piece.replace(b" ", b"")
                self._first_token = False
            raw += piece
        return self._strip(self._utf8.decode(bytes(raw)))

    def finish(self) -> str:
        """End of the stream; an unfinished character is dropped."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
            else:
                text = text[1:]
                self._to_strip -= 1
        return text
