"""`Tokenizer`: text to token ids and back, from the bundle's `tokenizer/` members.

Special tokens typed by a user stay plain text unless the caller asks otherwise. The vocabulary and the
splitting are the `tokenizers` library's; chat templates are in `chat_template.py` and streaming in
`detokenizer.py`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import tokenizers

from relaxpack.errors import BundleError, RequestError, TokenizerError
from relaxpack.runtime.detokenizer import Detokenizer, TokenBytes

TOKENIZER_MEMBER = "tokenizer/tokenizer.json"
TEXT_MEMBER = "tokenizer/text.json"


class MemberReader(Protocol):
    """The part of a bundle that the text side needs."""

    def read(self, member: str) -> bytes: ...


@dataclass(frozen=True)
class TextInfo:
    """What `tokenizer/text.json` says: templates, special tokens by role, and the publisher's sampling
    defaults."""

    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    end_token_ids: tuple[int, ...] = ()
    add_bos: bool = False
    special_tokens: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TextInfo:
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__ and v is not None}
        known["end_token_ids"] = tuple(known.get("end_token_ids", ()))
        return cls(**known)


class Tokenizer:
    """Encode and decode with one vocabulary. Safe to share between threads."""

    def __init__(self, tokenizer_json: str, text: TextInfo | None = None) -> None:
        self.text = text or TextInfo()
        try:
            self._source = json.loads(tokenizer_json)
            self._special_backend = tokenizers.Tokenizer.from_str(tokenizer_json)
        except Exception as error:   # the library raises bare Exception
            raise TokenizerError(f"tokenizer.json cannot be read: {error}") from error
        self._special_backend.no_padding()
        self._special_backend.no_truncation()
        added = self._special_backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._specials = {added[i].content: (i, added[i]) for i in self.special_ids if added[i].content}
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def from_bundle(cls, bundle: MemberReader) -> Tokenizer:
        """The tokenizer of a bundle. Raises BundleError where its members are damaged."""
        try:
            text = TextInfo.from_json(json.loads(bundle.read(TEXT_MEMBER)))
        except (ValueError, TypeError, AttributeError) as error:
            raise BundleError(f"bundle member {TEXT_MEMBER} is damaged: {error}") from error
        return cls(bundle.read(TOKENIZER_MEMBER).decode(), text)

    @property
    def vocab_size(self) -> int:
        """Ids that stand for a token; a model's logits may have more rows than this (padding)."""
        return self._special_backend.get_vocab_size(with_added_tokens=True)

    @property
    def tokenizer_json(self) -> str:
        """tokenizer.json as it was given."""
        return json.dumps(self._source, ensure_ascii=False)

    def token_id(self, token: str) -> int | None:
        return self._special_backend.token_to_id(token)

    @property
    def special_strings(self) -> tuple[str, ...]:
        return tuple(self._specials)

    def find_special(self, text: str) -> list[re.Match[str]]:
        """Where special tokens are written out in `text`, leftmost longest first."""
        return list(self._special_pattern.finditer(text))

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Ids of raw text. `special=True` reads special tokens written in the text as such; by default they
        are plain characters. `add_bos=None` follows the model (its `add_bos`); a BOS is never added twice."""
        _check_text(text)
        bos = self.text.bos_token_id if (self.text.add_bos if add_bos is None else add_bos) else None
        if special or not self._special_pattern.search(text):
            ids = self._encode_whole(text)
        else:
            ids = self._encode_with_owned(text, [])
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def encode_template(self, text: str, literals: Mapping[str, str]) -> list[int]:
        """Ids of a rendered chat template. `literals` maps marks in `text` to what the user wrote there,
        which is encoded as plain characters; special tokens outside the marks are the template's own.
        Without literals this is exactly the library's encoding."""
        for part in (text, *literals.values()):
            _check_text(part)
        if not literals:
            return self._encode_whole(text)
        mark = re.compile("|".join(map(re.escape, literals)))
        pieces, owned, position, length = [], [], 0, 0
        found = [(m, False) for m in mark.finditer(text)] + [(m, True) for m in self.find_special(text)]
        for match, is_special in sorted(found, key=lambda pair: pair[0].start()):
            pieces.append(text[position:match.start()])
            length += len(pieces[-1])
            pieces.append(match.group() if is_special else literals[match.group()])
            if is_special:
                owned.append((length, length + len(pieces[-1])))
            length += len(pieces[-1])
            position = match.end()
        return self._encode_with_owned("".join([*pieces, text[position:]]), owned)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """Text of ids; equals the joined pieces of `Detokenizer` for every split."""
        detokenizer = self.detokenizer(skip_special=skip_special, continuation=continuation)
        return detokenizer.add(ids) + detokenizer.finish()

    def detokenizer(self, *, skip_special: bool = True, continuation: bool = False,
                    show: Iterable[str] = ()) -> Detokenizer:
        """A fresh stream. `continuation`: the text goes on after a raw prompt, so its first space is kept. `show`
        names special tokens that have text even so (markers of tool calls)."""
        skip = self.special_ids - {self.token_id(token) for token in show} if skip_special else frozenset()
        return Detokenizer(self.token_bytes, skip=skip, continuation=continuation)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        ids = self._special_backend.get_vocab(with_added_tokens=True)
        return TokenBytes({i: token for token, i in ids.items()}, self._source.get("decoder"))

    def token_text(self, token_id: int) -> str:
        """One token for display (logprobs); bytes that are no whole character show as U+FFFD."""
        return self.token_bytes[token_id].decode("utf-8", errors="replace")

    def _encode_whole(self, text: str) -> list[int]:
        return list(self._special_backend.encode(text, add_special_tokens=False).ids)

    # In the plain backend special tokens are text. What the template owns is swapped for a sentinel, an added
    # token nobody can type, and swapped back by order in the ids; so the library sees the whole text at once, and
    # merges across borders, leading spaces and Metaspace's "first" rule come out as in an ordinary encoding.

    @cached_property
    def _plain_backend(self) -> tuple[Any, dict[tuple[bool, bool, bool], str], frozenset[int]]:
        backend = tokenizers.Tokenizer.from_str(json.dumps(self._source))
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True
        nonce = secrets.token_hex(12)
        flags = sorted({(t.lstrip, t.rstrip, t.single_word) for _, t in self._specials.values()})
        names = {flag: f"{nonce}:{n}:" for n, flag in enumerate(flags)}
        backend.add_tokens([tokenizers.AddedToken(name, lstrip=f[0], rstrip=f[1], single_word=f[2],
                                                  normalized=False) for f, name in names.items()])
        return backend, names, frozenset(i for i in map(backend.token_to_id, names.values()) if i is not None)

    def _encode_with_owned(self, text: str, owned: Sequence[tuple[int, int]]) -> list[int]:
        """Encode `text`, where only the spans in `owned` are special tokens."""
        backend, names, sentinel_ids = self._plain_backend
        pieces, position, expected = [], 0, []
        for start, end in owned:
            token_id, token = self._specials[text[start:end]]
            pieces += [text[position:start], names[token.lstrip, token.rstrip, token.single_word]]
            expected.append(token_id)
            position = end
        pieces.append(text[position:])
        next_owned = iter(expected)
        ids: list[int] = []
        for i in backend.encode("".join(pieces), add_special_tokens=False).ids:
            if i in sentinel_ids:
                ids.append(next(next_owned))
            elif i in self.special_ids and i != self._unknown_id:
                # Merges of SentencePiece vocabularies may build a special token out of plain characters.
                ids += self._spell(backend.id_to_token(i))
            else:
                ids.append(i)
        return ids

    def _spell(self, token: str) -> list[int]:
        """Ids of a token's characters one by one, in bytes where the vocabulary lacks a character."""
        ids = []
        for char in token:
            found = self.token_id(char)
            names = [f"<0x{byte:02X}>" for byte in char.encode()] if found is None else [char]
            ids += [i for i in map(self.token_id, names) if i is not None]
        return ids

    @cached_property
    def _unknown_id(self) -> int | None:
        model = self._source.get("model", {})
        unknown = model.get("unk_token")
        return self.token_id(unknown) if isinstance(unknown, str) else model.get("unk_id")


def _check_text(text: str) -> None:
    """Raise RequestError for half characters, which JSON escapes and command lines can smuggle into a `str`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text is not valid Unicode: it has a lone surrogate U+{ord(text[error.start]):04X} at "
                           f"character {error.start}") from None
