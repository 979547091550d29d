"""The config audit: every key of a foreign config is used, ignored by name with a reason, or refused.

`KeyReader` wraps one foreign dict; whoever imports it asks for keys, and `finish` refuses what nobody asked for.
`ConfigAudit` collects the answers of all files; the bundle records it and `inspect` shows it. Meanings of keys live in
`families.py`, `tokenizer_import.py` and `gguf_import.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from relaxpack.errors import ConfigError

_REQUIRED = object()


@dataclass(frozen=True)
class AuditEntry:
    file: str
    key: str
    value: str   # shortened repr
    status: str  # "used" | "ignored"
    why: str


@dataclass
class ConfigAudit:
    entries: list[AuditEntry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def to_json(self) -> dict[str, Any]:
        return {"entries": [asdict(e) for e in self.entries], "warnings": list(self.warnings)}

    def status(self, file: str, key: str) -> str | None:
        """"used", "ignored", or None for a key that was not there."""
        return next((e.status for e in self.entries if (e.file, e.key) == (file, key)), None)


def shorten(value: Any, limit: int = 80) -> str:
    """repr of a value, cut to `limit` characters; long lists by their length."""
    if isinstance(value, (list, tuple)) and len(value) > 16:
        return f"[{len(value)} values, first {shorten(value[0], 24)}]"
    text = repr(value)
    return text if len(text) <= limit else text[:limit - 3] + "..."


class KeyReader:
    """Reads one foreign dict and remembers which keys were asked for.

    A null value counts as absent: published configs write null for "default". `allowed` names keys that the user
    accepts unread (`--ignore-config-key`).
    """

    def __init__(self, file: str, data: Mapping[str, Any], audit: ConfigAudit, allowed: Iterable[str] = (),
                 prefix: str = "") -> None:
        self.file, self.data, self.audit = file, data, audit
        self.allowed, self.prefix = frozenset(allowed), prefix
        self._seen: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Present and not null."""
        return self.data.get(key) is not None

    def _note(self, key: str, status: str, why: str = "") -> None:
        if key in self.data and key not in self._seen:
            self._seen.add(key)
            self.audit.entries.append(
                AuditEntry(self.file, self.prefix + key, shorten(self.data[key]), status, why))

    def take(self, key: str, default: Any = _REQUIRED, kind: type | tuple[type, ...] | None = None) -> Any:
        """The value of `key`, marked used. Without a default an absent (or null) key is an error."""
        self._note(key, "used", "null: the default applies" if self.data.get(key, 0) is None else "")
        value = self.data.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ConfigError(f"{self.file}: the key {self.prefix + key!r} is missing; "
                                  "is this the config of a complete checkpoint?")
            return default
        if kind is not None:
            self._check(key, value, kind)
        return value

    def _check(self, key: str, value: Any, kind: type | tuple[type, ...]) -> None:
        kinds = kind if isinstance(kind, tuple) else (kind,)
        bad_bool = isinstance(value, bool) and bool not in kinds  # bool is an int in Python, not in a config
        if bad_bool or not isinstance(value, kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise ConfigError(f"{self.file}: {self.prefix + key!r} is {shorten(value)}, expected {names}")

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        return self.take(key, default, int)

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self.take(key, default, (int, float))
        return value if value is default else float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return self.take(key, default, bool)

    def ignore(self, key: str, why: str) -> None:
        self._note(key, "ignored", why)

    def require(self, key: str, accepted: tuple[Any, ...], why: str) -> None:
        """Refuse any value of `key` outside `accepted` (null is always accepted): we compute only that form."""
        value = self.data.get(key)
        if value is not None and (value not in accepted or isinstance(value, bool) != isinstance(accepted[0], bool)):
            raise ConfigError(f"{self.file}: {self.prefix + key} = {shorten(value)} is not supported ({why}); "
                              f"supported: {', '.join(map(repr, accepted))}")
        self._note(key, "used")

    def finish(self) -> None:
        """Refuse every key that nobody used or ignored."""
        unknown = []
        for key, value in self.data.items():
            if key in self._seen:
                continue
            if value is None:
                self.ignore(key, "null")
            elif key in self.allowed or self.prefix + key in self.allowed:
                self.ignore(key, "accepted by the user")
                self.audit.warn(f"{self.file}: {self.prefix + key} = {shorten(value)} is ignored, as you asked")
            else:
                unknown.append(key)
        if unknown:
            listed = ", ".join(f"{self.prefix + k} = {shorten(self.data[k])}" for k in sorted(unknown))
            raise ConfigError(f"{self.file}: unknown {'keys' if len(unknown) > 1 else 'key'}: {listed}. It may change "
                              f"what the model computes; if it does not: --ignore-config-key {sorted(unknown)[0]}")
