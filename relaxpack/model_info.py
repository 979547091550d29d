"""`ModelInfo`: the few facts about a model that the runtime needs; travels in the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class ModelInfo:
    name: str
    architecture: str            # "llama", "qwen2", ...
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int             # tokens a sequence may have (build limit, at most what the model supports)
    page_size: int
    kv_dtype: str
    activation_dtype: str
    max_batch: int               # sequences per step the functions were planned for
    prefill_chunk: int           # tokens per prefill step the functions were planned for
    bos_token_id: int | None
    end_token_ids: tuple[int, ...]
    add_bos: bool                # prepend BOS when encoding raw text

    @property
    def max_pages_per_sequence(self) -> int:
        return -(-self.max_context // self.page_size)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelInfo:
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        values["end_token_ids"] = tuple(values["end_token_ids"])
        return cls(**values)
