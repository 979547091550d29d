"""What a library says of the tensors that its functions take, against what the manifest says of the model. TVM compiles the
expected shape and dtype of every input into the library, so a manifest that was changed after the build is found before the
first step, and by name. Reads text only: knows no TVM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from relaxpack.dist.compat import other_inputs
from relaxpack.dist.manifest import TargetEntry
from relaxpack.errors import BundleError
from relaxpack.kernel_spec import counts_width
from relaxpack.model_info import FP8, ModelInfo, page_dtype
from relaxpack.step_interface import STEP_INPUTS

# As TVM's VM writes it: ErrorContext(fn=decode, loc=param[5], param=pages, annotation=R.Tensor((2, p, 2), dtype="float16"))
_DECLARED = re.compile(r"ErrorContext\(fn=(?P<function>\w+), loc=(?:param\[(?P<place>\d+)\], param=(?P<name>[^,]+)|return), "
                       r'annotation=(?:R\.Tensor\(\((?P<shape>[^"]*?),?\), dtype="(?P<dtype>\w+)"\))?')
RESULT, PARAMETERS = "result", "params"
_ADVICE = "the manifest was changed after the build; copy or build the bundle again"


class LibraryDiffers(BundleError):
    """The library was compiled for something else than the manifest says."""


@dataclass(frozen=True)
class Declared:
    """An input or result as the library checks it. `shape`: None for sizes known only at run time; empty, as `dtype`, for a
    tuple."""

    shape: tuple[int | None, ...]
    dtype: str


def declared(facts: str) -> dict[str, dict[str, Declared]]:
    """Function → input (in order), and RESULT → what is declared, out of `Library.facts`."""
    found: dict[str, dict[int, tuple[str, Declared]]] = {}
    for match in _DECLARED.finditer(facts):
        sizes = [size.removeprefix("T.int64(").removesuffix(")") for size in (match["shape"] or "").split(", ") if size]
        tensor = Declared(tuple(int(size) if size.isdecimal() else None for size in sizes), match["dtype"] or "")
        place = 1 << 30 if match["place"] is None else int(match["place"])
        found.setdefault(match["function"], {})[place] = match["name"] or RESULT, tensor
    return {function: dict(tensors[place] for place in sorted(tensors)) for function, tensors in found.items()}


def check_library(facts: str, entry: TargetEntry, info: ModelInfo, writer: str) -> None:
    """Raise LibraryDiffers unless the library, whose `Library.facts` are given, takes what a runner of this relaxpack gives
    for a model with `info`. `writer`: the relaxpack that built it."""
    functions = declared(facts)
    for function, expected in STEP_INPUTS[entry.target.kind].items():
        if functions and function in entry.functions and function not in functions:
            raise LibraryDiffers(f"manifest.json says that {entry.target.name} has {function}, and the library has no such "
                                 f"function: {_ADVICE}")
        tensors = functions.get(function, {}) if function in entry.functions else {}
        names = [name for name in tensors if name not in (RESULT, PARAMETERS)]
        if names and names != list(expected):
            raise LibraryDiffers(other_inputs(entry, writer, function, names, expected))
        for fact, given, compiled in _differences(function, tensors, info):
            raise LibraryDiffers(f"manifest.json says {fact} {given}, and the library was compiled for {compiled}: "
                                 + _ADVICE)
    for fact, given, symbol in _beyond(entry, info):
        raise LibraryDiffers(f"manifest.json says {fact} {given}, and {entry.target.name} was planned for "
                             f"{entry.symbolic_bounds[symbol]} ({symbol}): {_ADVICE}")


def _differences(function: str, tensors: dict[str, Declared], info: ModelInfo) -> Iterator[tuple[str, object, object]]:
    """(fact of the model, what the manifest says, what was compiled) where they differ."""
    pages = tensors.get("pages")
    if pages is not None and pages.dtype != page_dtype(info.kv_dtype):
        yield "kv_dtype", info.kv_dtype, FP8 if pages.dtype == page_dtype(FP8) else pages.dtype
    result = "hidden_size" if function == "embed" else "vocab_size"
    for name, dimension, fact, size in (
            ("pages", 0, "num_layers", info.num_layers), ("pages", 3, "num_kv_heads", info.num_kv_heads),
            ("pages", 4, "page_size", info.page_size), ("pages", 5, "head_dim", info.head_dim),
            (RESULT, 1, result, getattr(info, result)), ("drawn", 0, "max_batch", info.max_batch)):
        compiled = _size(tensors, name, dimension)
        if compiled not in (None, size):
            yield fact, size, compiled
    compiled = _size(tensors, "page_table", 1)
    if compiled not in (None, info.max_pages_per_sequence):
        yield "max_context", info.max_context, f"{compiled} pages of {info.page_size} tokens"
    compiled = _size(tensors, "counts", 1)
    if compiled not in (None, counts_width(info.vocab_size)):
        yield "vocab_size", info.vocab_size, f"counts of {compiled} words, not {counts_width(info.vocab_size)}"


def _size(tensors: dict[str, Declared], name: str, dimension: int) -> int | None:
    shape = tensors[name].shape if name in tensors else ()
    return shape[dimension] if dimension < len(shape) else None


def _beyond(entry: TargetEntry, info: ModelInfo) -> Iterator[tuple[str, int, str]]:
    """(limit, what the manifest says, symbol) where that is more than memory was planned for."""
    for fact, size, symbol in (("prefill_chunk", info.prefill_chunk, "t"), ("max_batch", info.max_batch, "b")):
        if size > entry.symbolic_bounds.get(symbol, size):
            yield fact, size, symbol
