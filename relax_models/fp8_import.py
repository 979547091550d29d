"""The keys of `quantization_config` in the schemes with fp8 weights: quant_method "fp8", and "compressed-tensors" where its
format is float-quantized.

The tensors are `fp8_tensors.py`. Of activations only one thing is taken: whether the scheme rounds them as it goes, with
scales of their own (dynamic). What else it says of them is ignored, which the audit says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from relaxpack.errors import ConfigError
from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.weight_format import BLOCK

_WEIGHTS_ONLY = "only the weights are taken: activations are not quantised with stored scales"
_BY_TENSOR = "which weights are fp8 is read from the tensors"


@dataclass(frozen=True)
class Fp8Scheme:
    """`block`: rows and columns that share a scale; None: one scale per tensor or per row, as its shape says. `dynamic`: the
    scheme rounds activations to fp8 with scales that it takes from them."""

    block: tuple[int, int] | None = None
    dynamic: bool = False


def _inner(outer: KeyReader, data: dict[str, object], path: str) -> KeyReader:
    return KeyReader(outer.file, data, outer.audit, outer.allowed, outer.prefix + path)


def fine_grained(keys: KeyReader) -> Fp8Scheme:
    """`quant_method` fp8: blocks where `weight_block_size` is given, else as the scales' shapes say."""
    keys.require("fmt", ("e4m3",), "the format of the weights")
    keys.require("scale_fmt", ("float", "ue8m0"), "the format of the scales")
    keys.require("is_checkpoint_fp8_serialized", (True,), "weights are quantised on the way in with --weights fp8")
    dynamic = keys.data.get("activation_scheme") == "dynamic"
    if dynamic:
        keys.take("activation_scheme")
    else:
        keys.ignore("activation_scheme", _WEIGHTS_ONLY)
    keys.ignore("kv_cache_scheme", "keys and values are kept in --kv-dtype")
    for key in ("modules_to_not_convert", "ignored_layers", "modules_to_convert"):
        keys.ignore(key, _BY_TENSOR)
    keys.ignore("dequantize", "how another program loads it")
    return Fp8Scheme(_block(keys, "weight_block_size"), dynamic)


def compressed_groups(keys: KeyReader) -> Iterator[tuple[KeyReader, KeyReader]]:
    """Readers of each group of layers and of its weights, after the keys that all formats of compressed-tensors have."""
    keys.require("quantization_status", ("compressed",), "what is stored must be quantised")
    for key in ("transform_config", "sparsity_config"):
        value = keys.take(key, None, dict)
        if value and value.get("format", "") != "dense":
            raise ConfigError(f"{keys.file}: {keys.prefix}{key} = {shorten(value)} is not supported: weights must be stored "
                              "dense and as the model multiplies with them")
    for key in ("ignore", "targets"):
        keys.ignore(key, _BY_TENSOR)
    keys.ignore("kv_cache_scheme", "keys and values are kept in --kv-dtype")
    for key in ("global_compression_ratio", "version"):
        keys.ignore(key, "describes the file")
    for name, data in keys.take("config_groups", kind=dict).items():
        if not isinstance(data, dict) or not isinstance(data.get("weights"), dict):
            raise ConfigError(f"{keys.file}: {keys.prefix}config_groups.{name} describes no weights: {shorten(data)}")
        group = _inner(keys, data, f"config_groups.{name}.")
        weights = _inner(group, group.take("weights"), "weights.")
        weights.require("dynamic", (False,), "weights have stored scales")
        for key in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
            weights.ignore(key, "how the weights were quantised, or how they are stored, which the tensors say")
        group.ignore("targets", _BY_TENSOR)
        group.ignore("output_activations", _WEIGHTS_ONLY)
        yield group, weights


def compressed_tensors(keys: KeyReader) -> Fp8Scheme:
    """Format float-quantized."""
    keys.require("format", ("float-quantized", "pack-quantized"), "of compressed-tensors, fp8 and 4-bit weights are read")
    blocks, dynamic = set(), True
    for group, weights in compressed_groups(keys):
        block, rounds = _group(group, weights)
        blocks.add(block)
        dynamic &= rounds
    blocks.discard(None)
    if len(blocks) > 1:
        raise ConfigError(f"{keys.file}: {keys.prefix}config_groups have different blocks: {sorted(blocks)}")  # type: ignore[type-var]
    return Fp8Scheme(blocks.pop() if blocks else None, dynamic)


def _group(group: KeyReader, weights: KeyReader) -> tuple[tuple[int, int] | None, bool]:
    """Its blocks, and whether it rounds activations dynamically."""
    group.require("format", ("float-quantized",), "the format of the whole is float-quantized")
    dynamic = _rounds(group.data.get("input_activations"))
    if dynamic:
        group.take("input_activations")
    else:
        group.ignore("input_activations", _WEIGHTS_ONLY)
    group.finish()
    weights.require("num_bits", (8,), "fp8 weights are read")
    weights.require("type", ("float",), "fp8 weights are read")
    weights.require("symmetric", (True,), "fp8 has no zero points")
    weights.require("strategy", ("tensor", "channel", "block"), "how far a scale reaches")
    for key in ("group_size", "actorder"):
        weights.ignore(key, "not part of tensor, channel and block scales")
    block = _block(weights, "block_structure")
    weights.finish()
    return block, dynamic


def _rounds(scheme: object) -> bool:
    """Whether a description of activations means fp8 with scales taken from them."""
    return isinstance(scheme, dict) and scheme.get("dynamic") is True and (
        scheme.get("num_bits"), scheme.get("type"), scheme.get("symmetric", True)) == (8, "float", True)


def _block(keys: KeyReader, key: str) -> tuple[int, int] | None:
    value = keys.take(key, None, list)
    if value is None:
        return None
    if len(value) != 2 or any(type(n) is not int or n < 1 for n in value) or value[1] % BLOCK:
        raise ConfigError(f"{keys.file}: {keys.prefix}{key} = {shorten(value)} is not supported; supported: [rows, columns] "
                          f"with columns a multiple of {BLOCK}")
    return value[0], value[1]
