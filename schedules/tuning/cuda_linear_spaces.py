"""The search spaces of the CUDA matmuls for exactly so many rows: which kernel with which tiling, or which library's. Plain
numbers that fit; whether they are fast, only the GPU says (docs/tuning.md, section 6).

A choice names its kernel as `family`. For a quantised weight, a kernel of float weights means: unpack the weight, then
multiply with that kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relaxpack.errors import TuningError
from relaxpack.kernel_spec import Kernel, LinearSpec
from relaxpack.schedules.kernels.cuda import linear, linear_rules
from relaxpack.schedules.kernels.cuda.codes_fp8 import can_convert
from relaxpack.schedules.kernels.cuda.library import LIBRARIES, library_linear, why_not
from relaxpack.schedules.kernels.cuda.many_tile import divides
from relaxpack.schedules.kernels.cuda.quantized_tilings import (
    BLOCK_ROWS,
    bulk_tilings,
    few_bulk_tilings,
    group_columns_tilings,
    mixed_tilings,
)

from .family import KernelFamily, Part
from .space import ListedSpace, Parameters, Space

Choice = dict[str, Any]
_ORDER = ("family", "columns", "strips", "warps", "unroll", "ahead", "stages", "consumers", "tile_n", "cluster", "split",
          "share", "blocks_per_sm", "skew", "group_m")
ALGORITHMS = 6                   # of a library's ranking that are tried
_TILE_START = 24                # what a tile costs beside its columns, in columns
_NARROW = 48                    # columns of a tile that only two blocks together take
_REGISTERS, _OTHER_REGISTERS = 65536, 32    # of a multiprocessor; what a thread needs beside the weights it loads


def linear_family(arch: str) -> KernelFamily:
    hopper = arch == "sm_90a"

    def parts(spec: LinearSpec) -> Sequence[Part]:
        if spec.max_rows is None or not hopper or not linear_rules.fits_tma(spec):
            return ()
        return (Part(spec.max_rows, spec.max_rows, linear_space(spec, can_convert(arch))),)

    def make(spec: LinearSpec, given: Mapping[str, Any]) -> Kernel:
        if not given:
            return linear.linear(spec, arch)
        if "library" in given:
            return library_linear(spec, str(given["library"]), int(given.get("algorithm", 0)))
        # In a fixed order, which a record does not keep: kernels are named by it.
        options = {key: given[key] for key in (*_ORDER, *sorted(set(given) - set(_ORDER))) if key in given}
        name = options.pop("family", None)
        known = {**linear.FAMILIES, **(linear.QUANTIZED_FAMILIES if spec.weight.quantized else {})}
        if name not in known or spec.max_rows is None:
            raise TuningError(f"no matmul kernel {name!r} for {spec.max_rows} rows of {spec.weight.name} weights; known: "
                              + ", ".join(known))
        plan = (str(name), options)
        if name in linear.QUANTIZED_FAMILIES:
            return linear.packed(spec, plan, hopper, spec.weight.e4m3 and can_convert(arch))
        return linear.unpacked(spec, hopper, plan) if spec.weight.quantized else linear.planned(spec, plan, hopper)

    def canonical(spec: LinearSpec) -> LinearSpec:
        """A kernel with a norm is the one without and a little more: it takes over its record."""
        plain = spec.without_norm()
        return replace(plain, phase="decode") if spec.max_rows else plain

    return KernelFamily("cuda.linear", canonical, parts, make)


def linear_space(spec: LinearSpec, convert: bool = False) -> Space:
    """Everything that fits `spec.max_rows` rows of this matrix, the rule's own choice as the default."""
    assert spec.max_rows is not None
    n, k, rows = spec.out_features, spec.in_features, spec.max_rows
    if spec.norm_epsilon is not None or spec.prepares_norm:      # a record of another kernel would bring the norm's own back
        plain = linear_space(spec.without_norm(), convert)
        assert isinstance(plain, ListedSpace)
        return ListedSpace(tuple(one for one in plain.choices if one.get("family", "").startswith(linear.NORM_FAMILIES)),
                           plain.default)
    found: list[Choice] = []
    if spec.weight.quantized:
        found += _quantized(spec)
    elif rows <= 16:
        found += ({"family": "gemm_rows", **one} for one in _rows_tilings(n, k, rows))
    if not spec.weight.quantized or rows > BLOCK_ROWS // 2:
        if rows <= 256:
            found += ({"family": "gemm_few", **one} for one in _few_tilings(n, k, rows))
        if rows > 32:
            found += _many_tilings(spec)
    found += [{"library": library, **({"algorithm": place} if place else {})} for library in LIBRARIES
              if why_not(spec, library) is None for place in range(ALGORITHMS)]
    return ListedSpace(tuple(found), default_choice(spec))


def default_choice(spec: LinearSpec) -> Parameters:
    """What the rule takes, in the words of the space."""
    name, options = linear_rules.rule_plan(spec, "sm_90a")
    return {"family": name, **options}


def _loads(n: int, k: int, words: int, threads: Sequence[int], share_x: bool = False) -> Iterator[Choice]:
    """How a block of the kernels for few rows takes the chunks of K: warps, chunks in flight, whether it loads a round
    ahead, strips of weight rows that share x (where there are many, or `share_x`), and how many blocks must fit a
    multiprocessor. `words`: registers of a chunk; `threads`: of a multiprocessor, which bounds the registers of each. No
    more in flight than there is of K, and than registers hold."""
    chunks = -(-k // 64)
    for strips in (1, 2) if n > 8192 or share_x else (1,):
        for ahead in (False, True):
            for warps in (2, 4, 8, 16, 32):
                for unroll in (1, 2, 4, 8):
                    for count in threads:
                        blocks, flying = count // 32 // warps, (1 + ahead) * unroll
                        fits = flying * strips * words <= _REGISTERS // count - _OTHER_REGISTERS
                        if blocks and fits and warps * flying <= max(chunks, 2):
                            yield {**({"strips": strips} if strips > 1 else {}), "warps": warps, "unroll": unroll,
                                   **({"ahead": True} if ahead else {}), "blocks_per_sm": blocks}


def _rows_tilings(n: int, k: int, rows: int) -> Iterator[Choice]:
    for one in _loads(n, k, 16, (512, 1024)):
        yield {"columns": 8 if rows <= 8 else 16, **one}


def _few_tilings(n: int, k: int, rows: int) -> Iterator[Choice]:
    """Enough blocks to fill the chip, and not much more than one wave of them. Blocks of fewer rows read a strip of weights
    several times, from the L2 cache."""
    whole = 128 if rows > 64 else -(-rows // 16) * 16
    half = -(-rows // 16) * 8
    for columns in sorted({-(-rows // 8) * 8, whole, *([half] if rows >= 32 else []), *([64] if 64 < rows <= 256 else [])}):
        if columns > 256:
            continue
        for consumers in (1, 2) if columns <= 64 else (2,):
            for per_sm in (1, 2) if columns <= 64 else (1,):
                for share in (1, 2) if columns >= 64 and columns % 16 == 0 and consumers == 2 else (1,):
                    for split in (1, 2, 3, 4, 5, 6, 7, 8):
                        blocks = -(-n // (64 * consumers)) * split * -(-rows // columns)
                        fits = split * share <= 8 and k // 64 // split >= 4
                        fills = blocks >= 0.4 * linear_rules.MULTIPROCESSORS or split == 8
                        if fits and fills and (split == 1 or blocks <= 1.2 * linear_rules.MULTIPROCESSORS * per_sm):
                            yield {"columns": columns, "consumers": consumers, "split": split, "share": share,
                                   "blocks_per_sm": per_sm}


def _many_tilings(spec: LinearSpec) -> Iterator[Choice]:
    """Only widths whose waves over the chip are not much worse than the best one's. K is split where tiles alone leave much
    of the chip without work; clusters that share a tile, warpgroups out of step and longer walks are for many rows. What
    the kernel does by default is left out, as the rule's choices leave it."""
    assert spec.max_rows is not None
    n, rows = spec.out_features, spec.max_rows
    found: list[tuple[int, int, Choice]] = []
    for tile in (_NARROW, *linear_rules.TILE_WIDTHS):
        for split in (1, 2, 3, 4):
            tiles = -(-rows // 128) * -(-n // tile)
            if not divides(tile, split, spec.gated) or (split > 1 and tiles > linear_rules.CLUSTERS[split]):
                continue
            if not linear_rules.keeps_bits(n, tile, split) or (tile == _NARROW and split == 1):
                continue
            waves = -(-tiles * split // linear_rules.MULTIPROCESSORS)
            found.append((waves, waves * (tile // split + _TILE_START), {
                "tile_n": tile, **({"split": split} if split > 1 else {})}))
    least = min(cost for _, cost, _ in found)
    for waves, cost, choice in found:
        if cost > (1.3 if waves <= 3 else 1.1) * least:
            continue
        many = rows >= 256 and "split" not in choice
        for cluster in (1, 2) if many else (1,):
            for skew in (0, 1) if many else (0,):
                for group in (8, 16) if many and rows >= 2048 else (8,):
                    yield {"family": "gemm_many", **choice, "cluster": cluster, **({"skew": skew} if skew else {}),
                           **({"group_m": group} if group != 8 else {})}


def _quantized(spec: LinearSpec) -> Iterator[Choice]:
    """Kernels that read the packed weight: x in registers or in shared memory, sums or weights scaled."""
    assert spec.max_rows is not None
    n, k, rows, weight = spec.out_features, spec.in_features, spec.max_rows, spec.weight
    words = 4 if weight.bits == 4 else 8
    if rows <= BLOCK_ROWS or weight.group_size == 16:
        for columns in (8,) if rows <= 8 else (16,) if rows <= 16 else (16, 32):      # of more rows, blocks read W from L2
            for one in _loads(n, k, words, (512, 1024), share_x=rows > 8):
                yield {"family": "gemm_rows_quant", "columns": columns, **one}
    if rows <= BLOCK_ROWS:
        yield from ({"family": "gemm_rows_bulk", **one} for one in bulk_tilings(k, rows, weight))
    if rows <= 4 and weight.bits == 4:
        yield from ({"family": "gemm_group_columns", **one} for one in group_columns_tilings(k, rows))
    if rows > 8 and not linear_rules.unpacks(spec, rows, True):
        yield from ({"family": "gemm_few_bulk", **one} for one in few_bulk_tilings(n, k, rows, weight))
    yield from ({"family": "gemm_mixed", **one} for one in mixed_tilings(n, k, rows, weight))
    if weight.group_size == 16 or rows > BLOCK_ROWS:
        return
    for strips in (1, 2):
        for warps in (4, 8):
            for split in (1, 2, 3, 4, 6, 8):
                blocks = -(-n // (16 * strips * warps)) * split
                if k // 64 // split >= 4 and (split == 1 or blocks <= 2.4 * linear_rules.MULTIPROCESSORS):
                    if blocks >= 0.4 * linear_rules.MULTIPROCESSORS or split == 8:
                        yield {"family": "gemm_few_quant", "columns": -(-rows // 8) * 8, "strips": strips, "warps": warps,
                               "split": split}
