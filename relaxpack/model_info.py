"""`ModelInfo`: the few facts about a model that the runtime needs; travels in the manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

FP8 = "float8_e4m3fn"        # a KV dtype: numbers beyond 448 are stored as 448
KV_DTYPES = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float32", "fp8": FP8}  # as a build is told: dtype


def page_dtype(kv_dtype: str) -> str:
    """dtype of the tensor that holds pages of a KV dtype: e4m3 numbers are bytes there, which every library can carry."""
    return "uint8" if kv_dtype == FP8 else kv_dtype


def kv_item_bytes(kv_dtype: str) -> int:
    return {"float32": 4, FP8: 1}.get(kv_dtype, 2)


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
        """Raises KeyError, TypeError or ValueError where a value is missing or makes no sense."""
        values = {f.name: data[f.name] for f in fields(cls)}
        for name, kind in (*((name, int) for name in _SIZES), *((name, str) for name in _NAMES), ("add_bos", bool)):
            if type(values[name]) is not kind or (kind is int and not 1 <= values[name] < 2**31):
                raise ValueError(f"model_info: {name} is {values[name]!r}")
        if values["kv_dtype"] not in KV_DTYPES.values():
            raise ValueError(f"model_info: kv_dtype is {values['kv_dtype']!r}")
        values["end_token_ids"] = tuple(values["end_token_ids"])
        for token_id in (*values["end_token_ids"], *([] if (bos := values["bos_token_id"]) is None else [bos])):
            if type(token_id) is not int or not 0 <= token_id < values["vocab_size"]:
                raise ValueError(f"model_info: the token id {token_id!r} is not one of {values['vocab_size']}")
        return cls(**values)


_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_context", "page_size",
          "max_batch", "prefill_chunk")
_NAMES = ("name", "architecture", "kv_dtype", "activation_dtype")
