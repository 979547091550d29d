"""What a checkpoint holds beside its config: tensors, tokenizer assets, generation defaults, and where it came from.

Plain records that both importers (Hugging Face folder, GGUF) fill. No file is read here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from relaxpack.weight_format import QuantizedTensor, WeightFormat


@dataclass(frozen=True)
class TensorInfo:
    """A checkpoint tensor: its Hugging Face name, shape `[out, in]` or `[n]`, and how its numbers are stored."""

    name: str
    shape: tuple[int, ...]
    format: WeightFormat


class TensorSource(Protocol):
    """A file set that knows its tensors by Hugging Face name and reads one at a time."""

    def infos(self) -> dict[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray | QuantizedTensor: ...

    def same_bytes(self, one: str, other: str) -> bool: ...


@dataclass(frozen=True)
class TokenizerAssets:
    """Everything the runtime needs to turn text into ids and messages into a prompt.

    `files` always holds "tokenizer.json". `chat_template` is the default template or None (completion models);
    `named_templates` all of them by name. `end_token_ids`: ids that end a reply. `add_bos`: raw text starts with BOS.
    `special_tokens`: "bos_token", "eos_token", ... as templates name them.
    """

    files: dict[str, bytes]
    chat_template: str | None
    named_templates: dict[str, str]
    bos_token_id: int | None
    end_token_ids: tuple[int, ...]
    add_bos: bool
    special_tokens: dict[str, str] = field(default_factory=dict)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")


@dataclass(frozen=True)
class GenerationDefaults:
    """The checkpoint's advice for sampling; None where it gives none. `do_sample` False means greedy."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class CheckpointSource:
    """Where a checkpoint came from, for reports. `bytes` counts the files that hold tensors."""

    name: str
    kind: str  # "huggingface" | "gguf"
    bytes: int
    files: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}, {self.bytes / 1e6:.1f} MB)"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "bytes": self.bytes, "files": list(self.files)}
