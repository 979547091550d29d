"""SpecializeBuckets: `decode` over a symbolic batch becomes one function per bucket, `decode_1`, `decode_2`, ...

With the batch known, kernels are chosen per bucket, every size is a constant and the whole step can be captured. The
symbolic function stays: it serves batches above the largest bucket and runs eagerly.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.passes.rewrite import exported_functions
from tvm import relax

BUCKET = "relaxpack.bucket"  # function attribute: the size this function is specialised for


def decode_buckets(max_batch: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every 8 up to 32, every 16 up to 64, every 32 beyond; `max_batch` itself is always a bucket."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 65, 16), *range(96, max_batch + 1, 32)]
    return tuple(sorted({size for size in sizes if size < max_batch} | {max_batch}))


def spread_buckets(max_batch: int) -> tuple[int, ...]:
    """The decode buckets that get a second function (SpreadDecode): where attention is what a step costs, rows of padding
    cost little, so that powers of two are enough."""
    return tuple(size for size in decode_buckets(max_batch) if size & (size - 1) == 0 or size == max_batch)


def prefill_buckets(prefill_chunk: int) -> tuple[int, ...]:
    """Token counts up to 512, where launches cost more than arithmetic."""
    return tuple(size for size in (16, 32, 64, 128, 192, 256, 384, 512) if size <= prefill_chunk)


def bucket_of(func: relax.Function) -> int | None:
    """The bucket a function is specialised for; None for a symbolic one."""
    value = (func.attrs or {}).get(BUCKET)
    return None if value is None else int(value)


def buckets_of(mod: tvm.IRModule) -> dict[str, tuple[int, ...]]:
    """Function → ascending sizes that it is specialised for."""
    found: dict[str, list[int]] = defaultdict(list)
    for gv, func in exported_functions(mod):
        if (size := bucket_of(func)) is not None:
            found[gv.name_hint.removesuffix(f"_{size}")].append(size)
    return {name: tuple(sorted(sizes)) for name, sizes in sorted(found.items())}


def SpecializeBuckets(function: str, variable: str, buckets: tuple[int, ...]) -> Any:
    """The pass. `variable` is the symbolic size of `function` that the buckets replace."""

    @tvm.transform.module_pass(opt_level=0, name="SpecializeBuckets")
    def run(mod: tvm.IRModule, _ctx: Any) -> tvm.IRModule:
        functions = dict(mod.functions_items())
        (original,) = [func for gv, func in exported_functions(mod) if gv.name_hint == function]
        for size in buckets:
            name = f"{function}_{size}"
            special = relax.utils.copy_with_new_vars(original).bind_symbolic_vars({variable: size})
            functions[tvm.ir.GlobalVar(name)] = special.with_attr(BUCKET, size).with_attr("global_symbol", name)
        return tvm.IRModule(functions, attrs=mod.attrs)

    return run
