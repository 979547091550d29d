"""relaxpack: compile a language model to a `.so` on Apache TVM Relax and serve it with a lean runtime.

Importing this package imports neither TVM nor numpy; the public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "Bundle", "__version__", "build_bundle"]

_LAZY = {"LLM": "relaxpack.llm", "build_bundle": "relaxpack.compile", "Bundle": "relaxpack.dist.bundle"}

if TYPE_CHECKING:
    from relaxpack.compile import build_bundle
    from relaxpack.dist.bundle import Bundle
    from relaxpack.llm import LLM


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'relaxpack' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
