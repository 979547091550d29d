"""The search spaces of the CPU kernels. Parameters keep the layout of weights, so any choice fits any bundle's weights,
and an integer sum has no order; float sums run over K in one order whatever the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

from relaxpack.kernel_spec import AttentionSpec, LinearSpec, NormSpec
from relaxpack.schedules.kernels.cpu import attention_decode, attention_prefill, linear_float, linear_quantized
from relaxpack.schedules.kernels.cpu.isa import Isa
from relaxpack.schedules.kernels.cpu.norm import NormTuning, norm
from relaxpack.schedules.kernels.cpu.rope_append import RopeTuning, rope_append

from .family import KernelFamily, Part, known_parameters
from .space import Parameters, SearchSpace

FEW_ROWS = 16   # up to these, starting threads for rows costs about what they save


def families(isa: Isa) -> dict[str, KernelFamily]:
    """Every family by name, for one instruction set."""
    made = (_linear_quantized(isa), _linear_float(isa), _decode_attention(isa), _prefill_attention(isa), _norm(isa),
            _rope_append(isa))
    return {family.name: family for family in made}


def _space(default: Any, valid: Any = None, **values: tuple[Any, ...]) -> SearchSpace:
    chosen = {name: value for name, value in asdict(default).items() if name in values}
    return SearchSpace(values, chosen, valid) if valid is not None else SearchSpace(values, chosen)


def _linear_canonical(spec: LinearSpec) -> LinearSpec:
    return replace(spec, max_rows=None)


def _ascending(parameters: Parameters) -> bool:
    return all(a < b for a, b in pairwise(parameters["tiles"]))


def _linear_quantized(isa: Isa) -> KernelFamily:
    default = linear_quantized.default_tuning(isa)

    def parts(spec: LinearSpec) -> Sequence[Part]:
        heights = (2, 4, 6, 8, 12, 16) if isa.lanes == 16 else (2, 3, 4, 6)
        pairs = tuple((small, large) for small in (2, 4, 8) for large in heights if large > small)
        tiles: tuple[tuple[int, ...], ...] = (*((height,) for height in heights), *pairs)
        if spec.phase == "prefill":
            return (Part(1, None, _space(default, _ascending, tiles=tiles, tile_prefetch=(False, True),
                                         rows_of_task=(32, 64, 128, 256, 512))),)
        chains = {"chains": (1, 2, 4)} if isa.vnni else {}
        return (Part(1, 1, _space(default, prefetch=(0, 512, 1024, 2048, 4096, 8192), threads=(False, True), **chains)),
                Part(2, None, _space(default, _ascending, tiles=tiles, tile_prefetch=(False, True))))

    return KernelFamily("cpu.linear_quantized", _linear_canonical, parts,
                        lambda spec, given: linear_quantized.linear_quantized(isa, spec, known_parameters(given, default)))


def _linear_float(isa: Isa) -> KernelFamily:
    default = linear_float.default_tuning(isa)

    def parts(spec: LinearSpec) -> Sequence[Part]:
        heights = (2, 3, 4, 6, 8, 10, 12) if isa.lanes == 16 else (2, 3, 4)
        tiles: tuple[tuple[int, ...], ...] = (*((height,) for height in heights),
                                              *((small, large) for small in heights[:2] for large in heights[2:]))
        if spec.phase == "prefill":
            return (Part(1, None, _space(default, tiles=tiles, rows_of_task=(32, 64, 128, 256, 512))),)
        return (Part(1, 1, _space(default, unroll=(1, 2, 4, 8), prefetch=(0, 8, 16, 32, 64, 128), threads=(False, True))),
                Part(2, None, _space(default, tiles=tiles)))

    return KernelFamily("cpu.linear_float", _linear_canonical, parts,
                        lambda spec, given: linear_float.linear_float(isa, spec, known_parameters(given, default)))


# Of a real model's size, so that a kernel made from a canonical spec can run; nothing in the code depends on them but
# strides.
_LAYERS, _PAGES, _POSITIONS = 16, 256, 4096


def _attention_canonical(spec: AttentionSpec) -> AttentionSpec:
    return replace(spec, num_layers=_LAYERS, max_pages=_PAGES, max_position=_POSITIONS)


def _decode_attention(isa: Isa) -> KernelFamily:
    default = attention_decode.DecodeTuning()

    def parts(spec: AttentionSpec) -> Sequence[Part]:
        return (Part(1, 1, _space(default, keys=(16, 32, 64, 128), max_parts=(4, 8, 16), keys_of_part=(32, 64, 128, 256),
                                  serial_keys=(16, 48, 96, 192))),)

    return KernelFamily("cpu.decode_attention", _attention_canonical, parts,
                        lambda spec, given: attention_decode.decode_attention(isa, spec, known_parameters(given, default)))


def _prefill_attention(isa: Isa) -> KernelFamily:
    default = attention_prefill.default_tuning(isa)

    def parts(spec: AttentionSpec) -> Sequence[Part]:
        tiles = (2, 4, 6) if isa.lanes == 16 else (1, 2, 3)
        return (Part(1, None, _space(default, keys=(32, 64, 128), rows=(12, 24, 48, 96), tile=tiles, columns=(1, 2, 4))),)

    return KernelFamily("cpu.prefill_attention", _attention_canonical, parts,
                        lambda spec, given: attention_prefill.prefill_attention(isa, spec, known_parameters(given, default)))


def _norm(isa: Isa) -> KernelFamily:
    default = NormTuning()

    def parts(spec: NormSpec) -> Sequence[Part]:
        return (Part(1, 1, _space(default, chains=(1, 2, 4, 8))),
                Part(2, FEW_ROWS, _space(default, serial_below=(2, 4, 8, 16, 32))))

    return KernelFamily("cpu.norm", lambda spec: spec, parts,
                        lambda spec, given: norm(isa, spec, known_parameters(given, default)))


def _rope_append(isa: Isa) -> KernelFamily:
    default = RopeTuning()

    def parts(spec: AttentionSpec) -> Sequence[Part]:
        return (Part(2, FEW_ROWS, _space(default, serial_below=(2, 4, 8, 16, 32))),)

    return KernelFamily("cpu.rope_append", _attention_canonical, parts,
                        lambda spec, given: rope_append(isa, spec, known_parameters(given, default)))
