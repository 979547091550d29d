"""The search spaces of the CUDA kernels: which matmul kernel with which tiling for exactly so many rows, or which library's,
and the tiles of both attentions. Every choice can be compiled without a GPU; which is fast, only the GPU says: see
benchmarks/gpu/tune.py.

A build has functions of their own for each bucket, so a matmul's workload includes its rows (`max_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from relaxpack.errors import TuningError
from relaxpack.kernel_spec import AttentionSpec, Kernel, LinearSpec
from relaxpack.schedules.kernels.cuda import attention_decode_tuning as decode_tuning
from relaxpack.schedules.kernels.cuda import attention_prefill, attention_prefill_hopper, linear
from relaxpack.schedules.kernels.cuda.attention_decode import decode_attention
from relaxpack.schedules.kernels.cuda.library import LIBRARIES, library_linear, why_not
from relaxpack.target import TargetSpec

from .family import KernelFamily, Part, known_parameters
from .space import ListedSpace, Parameters, SearchSpace, Space

_LAYERS, _PAGES, _POSITIONS = 16, 256, 4096     # of canonical specs; the code depends on them as strides alone


def families(target: TargetSpec) -> dict[str, KernelFamily]:
    made = (_linear(target.arch), _decode_attention(target.arch), _prefill_attention(target.arch))
    return {family.name: family for family in made}


# ---- matmuls of float weights ----

def _linear(arch: str) -> KernelFamily:
    hopper = arch == "sm_90a"

    def parts(spec: LinearSpec) -> Sequence[Part]:
        if spec.max_rows is None or spec.weight.quantized or not hopper or not linear._fits_tma(spec):
            return ()
        return (Part(spec.max_rows, spec.max_rows, linear_space(spec)),)

    def make(spec: LinearSpec, given: Mapping[str, Any]) -> Kernel:
        if not given:
            return linear.linear(spec, arch)
        if "library" in given:
            return library_linear(spec, str(given["library"]))
        name, options = given.get("family"), {key: value for key, value in given.items() if key != "family"}
        if name not in linear.FAMILIES or spec.max_rows is None:
            raise TuningError(f"no matmul kernel {name!r} for {spec.max_rows} rows; known: {', '.join(linear.FAMILIES)}")
        return linear._one(spec, (str(name), options), hopper)

    return KernelFamily("cuda.linear", lambda spec: replace(spec, phase="decode") if spec.max_rows else spec, parts, make)


def linear_space(spec: LinearSpec) -> Space:
    """Kernels and tilings for exactly `spec.max_rows` rows."""
    assert spec.max_rows is not None
    n, k, rows = spec.out_features, spec.in_features, spec.max_rows
    name, options = linear.hopper_plan(n, k, rows, spec.gated)
    found: list[Parameters] = []
    if rows <= 16:
        found += [{"family": "gemm_rows", **one} for one in _rows_tilings(k, rows)]
    if 2 <= rows <= 256:
        found += [{"family": "gemm_few", **one} for one in _few_tilings(n, k, rows)]
    if rows > 64:
        found += [{"family": "gemm_many", "tile_n": tile, "cluster": cluster} for tile in sorted(linear.TILE_COST)
                  for cluster in (1, 2) if not spec.gated or (tile in (128, 256) and cluster == 1)]
    found += [{"library": library} for library in LIBRARIES if why_not(spec, library) is None]
    return ListedSpace(tuple(found), {"family": name, **options})


def _rows_tilings(k: int, rows: int) -> Iterator[dict[str, int]]:
    for warps in (2, 4, 8, 16):
        for unroll in (1, 2, 4):
            if warps * 2 * 64 <= max(k, 128):
                yield {"columns": 8 if rows <= 8 else 16, "warps": warps, "unroll": unroll}


def _few_tilings(n: int, k: int, rows: int) -> Iterator[dict[str, int]]:
    """Enough blocks to fill the chip, and not much more than one wave of them."""
    for columns in sorted({-(-rows // 8) * 8, 128 if rows > 64 else -(-rows // 16) * 16}):
        for per_sm in (1, 2) if columns <= 64 else (1,):
            for share in (1, 2) if columns >= 64 and columns % 16 == 0 else (1,):
                for split in (1, 2, 3, 4, 6, 8):
                    blocks = -(-n // 128) * split * -(-rows // columns)
                    fits = split * share <= 8 and k // 64 // split >= 4
                    if fits and (split == 1 or blocks <= 1.2 * linear.MULTIPROCESSORS * per_sm):
                        yield {"columns": columns, "consumers": 2, "split": split, "share": share, "blocks_per_sm": per_sm}


# ---- attention ----

def _canonical(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, num_layers=_LAYERS, max_pages=_PAGES, max_position=_POSITIONS)


def _decode_attention(arch: str) -> KernelFamily:
    def parts(spec: AttentionSpec) -> Sequence[Part]:
        default = decode_tuning.default_tuning(spec, arch)
        block_kb, multiprocessor_kb, count = decode_tuning.LIMITS[arch]

        def fits(given: Parameters) -> bool:
            size = decode_tuning.shared_bytes(spec, replace(default, **given)) / 1024
            per_sm = given["blocks"] // count
            return size <= block_kb and per_sm * (size + 1) <= multiprocessor_kb

        return (Part(1, None, SearchSpace({"warps": (2, 4, 8), "stages": (2, 3, 4), "key_tiles": (1, 2),
                                           "blocks": (count, 2 * count, 3 * count)}, asdict(default), fits)),)

    def make(spec: AttentionSpec, given: Mapping[str, Any]) -> Kernel:
        return decode_attention(spec, arch, known_parameters(given, decode_tuning.default_tuning(spec, arch)))

    return KernelFamily("cuda.decode_attention", _canonical, parts, make)


def _prefill_attention(arch: str) -> KernelFamily:
    def default_of(spec: AttentionSpec) -> Any:
        hopper = arch == "sm_90a" and attention_prefill_hopper.supported(spec)
        return attention_prefill_hopper.default_tuning(spec) if hopper else attention_prefill.default_tuning(spec, arch)

    def parts(spec: AttentionSpec) -> Sequence[Part]:
        default, limit = default_of(spec), decode_tuning.LIMITS[arch][0] * 1024
        if isinstance(default, attention_prefill_hopper.HopperTuning):
            keys = (64, 128) if spec.head_dim <= 128 else (64,)
            values: dict[str, tuple[Any, ...]] = {"keys": keys, "ping_pong": (False, True)}
            chosen = {name: value for name, value in asdict(default).items() if name in values}
            return (Part(1, None, SearchSpace(values, chosen, lambda given: attention_prefill_hopper.shared_bytes(
                spec, replace(default, **given)) <= limit)),)
        return (Part(1, None, SearchSpace(
            {"warps": (4, 8), "row_tiles": (1, 2), "keys": (16, 32, 64)}, asdict(default),
            lambda given: attention_prefill.shared_bytes(spec, replace(default, **given)) <= limit)),)

    def make(spec: AttentionSpec, given: Mapping[str, Any]) -> Kernel:
        return attention_prefill.prefill_attention(spec, arch, known_parameters(given, default_of(spec)))

    return KernelFamily("cuda.prefill_attention", _canonical, parts, make)
