"""The search spaces of the CUDA kernels: matmuls (`cuda_linear_spaces`), norms, and the tiles of both attentions. Every
choice can be compiled without a GPU; which is fast, only the GPU says: see benchmarks/gpu/tune.py.

A build has functions of their own for each bucket, so a matmul's workload includes its rows (`max_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from relaxpack.errors import TuningError
from relaxpack.kernel_spec import AttentionSpec, FusedAttentionSpec, Kernel, NormSpec
from relaxpack.schedules.kernels.cuda import attention_decode_tuning as decode_tuning
from relaxpack.schedules.kernels.cuda import attention_prefill, norm
from relaxpack.schedules.kernels.cuda import attention_prefill_hopper_tuning as hopper
from relaxpack.schedules.kernels.cuda import rope_append_attention_tuning as fused_tuning
from relaxpack.schedules.kernels.cuda.attention_decode import decode_attention
from relaxpack.schedules.kernels.cuda.fragments import early_launch
from relaxpack.schedules.kernels.cuda.rope_append import rope_append
from relaxpack.schedules.kernels.cuda.rope_append_attention import rope_append_attention
from relaxpack.target import TargetSpec

from .cuda_linear_spaces import linear_family
from .family import KernelFamily, Part, known_parameters
from .space import ListedSpace, Parameters, SearchSpace

_LAYERS, _PAGES, _POSITIONS = 16, 256, 4096     # of canonical specs; the code depends on them as strides alone
_EPSILON = 1e-5                                 # a constant in the code


def families(target: TargetSpec) -> dict[str, KernelFamily]:
    made = (linear_family(target.arch), _norm(target.arch), _decode_attention(target.arch),
            _prefill_attention(target.arch), _fused_attention(target.arch), _rope_append(target.arch))
    return {family.name: family for family in made}


# ---- norm ----

def _norm(arch: str) -> KernelFamily:
    """One kernel serves every number of rows, another one many of them. Dependent launch needs Hopper."""
    def parts(spec: NormSpec) -> Sequence[Part]:
        default, most = norm.default_tuning(spec, arch), -(-spec.hidden_size // 8 // 32) * 32
        launches = (False, True) if early_launch(arch) else (False,)
        threads = tuple(sorted({32, 64, 128, 256, 512, 1024, default.threads}))
        count = decode_tuning.LIMITS[arch][2]
        blocks = (0, *(per_sm * count for per_sm in (1, 2, 4, 8, 16)))

        def fits(given: Parameters) -> bool:
            return given["threads"] <= most <= 8 * given["threads"] and given["blocks"] * given["threads"] <= 2048 * count

        space = SearchSpace({"threads": threads, "dependent_launch": launches, "blocks": blocks}, asdict(default), fits)
        return (Part(1, None, space),)

    def make(spec: NormSpec, given: Mapping[str, Any]) -> Kernel:
        return norm.norm_kernel(spec, arch, known_parameters(given, norm.default_tuning(spec, arch)))

    return KernelFamily("cuda.norm", lambda spec: replace(spec, epsilon=_EPSILON), parts, make)


# ---- attention ----

def _canonical(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, num_layers=_LAYERS, max_pages=_PAGES, max_position=_POSITIONS)


def _decode_attention(arch: str) -> KernelFamily:
    def parts(spec: AttentionSpec) -> Sequence[Part]:
        default = decode_tuning.default_tuning(spec, arch)
        block_kb, multiprocessor_kb, count = decode_tuning.LIMITS[arch]

        def fits(given: Parameters) -> bool:
            size = decode_tuning.shared_bytes(spec, replace(default, **given)) / 1024
            per_sm = -(-given["blocks"] // count)
            return size <= block_kb and per_sm * (size + 1) <= multiprocessor_kb

        even = 1 << (2 * count).bit_length() - 1                     # divides the tiles of one long sequence
        values = {"warps": (2, 4, 8), "stages": (2, 3, 4), "key_tiles": (1, 2), "compact": (False, True),
                  "blocks": (count // 4, count // 2, count, even, 2 * count, 3 * count, 4 * count)}
        return (Part(1, None, SearchSpace(values, asdict(default), fits)),)

    def make(spec: AttentionSpec, given: Mapping[str, Any]) -> Kernel:
        return decode_attention(spec, arch, known_parameters(given, decode_tuning.default_tuning(spec, arch)))

    return KernelFamily("cuda.decode_attention", _canonical, parts, make)


def _prefill_attention(arch: str) -> KernelFamily:
    """Two kernels, told apart by their parameters: the portable one has `warps`. Over e4m3 pages either may be chosen."""
    def portable(spec: AttentionSpec) -> SearchSpace:
        default, limit = attention_prefill.default_tuning(spec, arch), decode_tuning.LIMITS[arch][0] * 1024
        return SearchSpace({"warps": (4, 8), "row_tiles": (1, 2), "keys": (16, 32, 64)}, asdict(default),
                           lambda given: attention_prefill.shared_bytes(spec, replace(default, **given)) <= limit)

    def for_hopper(spec: AttentionSpec) -> SearchSpace:
        default = hopper.default_tuning(spec)
        values: dict[str, tuple[Any, ...]] = {
            "consumers": (2, 3), "keys": (64, 80, 128, 160, 192), "stages": (2, 3, 4), "query_stages": (1, 2),
            "packed": (False, True), "blocks": (0, 132), "ping_pong": (False, True)}
        if spec.fp8:
            values |= {"keys": (64, 96, 128), "stages": (2, 3), "packed": (True,), "blocks": (132,), "raw_stages": (2, 3, 4)}
        chosen = {name: value for name, value in asdict(default).items() if name in values}
        return SearchSpace(values, chosen, lambda given: hopper.fits(spec, replace(default, **given)))

    def parts(spec: AttentionSpec) -> Sequence[Part]:
        if arch != "sm_90a" or not hopper.supported(spec):
            return (Part(1, None, portable(spec)),)
        space, other = for_hopper(spec), portable(spec)
        if not spec.fp8:
            return (Part(1, None, space),)
        return (Part(1, None, ListedSpace((*space.all(), other.default, *other.all()), space.default)),)

    def make(spec: AttentionSpec, given: Mapping[str, Any]) -> Kernel:
        if not given:                    # the rule may have another kernel for few tokens
            return attention_prefill.prefill_attention(spec, arch)
        on_hopper = arch == "sm_90a" and hopper.supported(spec) and not (spec.fp8 and "warps" in given)
        default = hopper.default_tuning(spec) if on_hopper else attention_prefill.default_tuning(spec, arch)
        return attention_prefill.prefill_attention(spec, arch, known_parameters(given, default))

    return KernelFamily("cuda.prefill_attention", _canonical, parts, make)


def _fused_attention(arch: str) -> KernelFamily:
    """RoPE, append and attention of exactly so many rows, where the rule has them in one kernel."""
    def parts(spec: FusedAttentionSpec) -> Sequence[Part]:
        default = fused_tuning.fused_tuning(spec.attention, spec.rows, arch)
        if default is None:
            return ()
        values: dict[str, tuple[Any, ...]] = {
            "cluster": tuple(c for c in (1, 2, 4, 8, 16) if c <= fused_tuning.LARGEST_CLUSTER.get(arch, 8)),
            "warps": (2, 4, 8), "stages": (2, 3, 4, 5), "key_tiles": (1, 2),
            "reserve": tuple(sorted({0, default.reserve, *(fused_tuning.reserve(arch, blocks) for blocks in (1, 2))}))}
        limit = decode_tuning.LIMITS[arch][0] * 1024

        def fits(given: Parameters) -> bool:
            tuning = replace(default, **{**given, "reserve": 0})
            least = tuning.shared_bytes(spec.attention)
            blocks = spec.rows * spec.attention.num_kv_heads * given["cluster"]
            return (least <= limit and (not given["reserve"] or least <= given["reserve"])
                    and blocks <= 4 * decode_tuning.LIMITS[arch][2])

        chosen = {name: value for name, value in asdict(default).items() if name in values}
        return (Part(spec.rows, spec.rows, SearchSpace(values, chosen, fits)),)

    def make(spec: FusedAttentionSpec, given: Mapping[str, Any]) -> Kernel:
        default = fused_tuning.fused_tuning(spec.attention, spec.rows, arch)
        if default is None:
            raise TuningError(f"RoPE, append and attention of {spec.rows} rows are kernels of their own on {arch}")
        kernel = rope_append_attention(spec.attention, spec.rows, arch, known_parameters(given, default))
        assert kernel is not None
        return kernel

    return KernelFamily("cuda.rope_append_attention", lambda spec: replace(spec, attention=_canonical(spec.attention)),
                        parts, make)


def _rope_append(arch: str) -> KernelFamily:
    """Where it is a kernel of its own: nothing of it may vary, but it stands between others in a step."""
    def make(spec: AttentionSpec, given: Mapping[str, Any]) -> Kernel:
        if given:
            raise TuningError(f"rope_append has no parameter {', '.join(sorted(given))}")
        return rope_append(spec, arch)

    return KernelFamily("cuda.rope_append", _canonical, lambda spec: (), make)
