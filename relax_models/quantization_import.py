"""`quantization_config` of Hugging Face folders: fp8 and 4-bit weights are read, all other schemes refused by name.

Older writers keep the scheme in a file of its own as well; where both are there they must agree. What each scheme's keys
mean is in `fp8_import.py` and `int4_import.py`; the tensors are read by `fp8_tensors.py` and `int4_tensors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from relaxpack.errors import ConfigError
from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.relax_models.fp8_import import Fp8Scheme, compressed_tensors, fine_grained
from relaxpack.relax_models.int4_import import (
    FIRST_FORM,
    FORM_KEYS,
    ZEROS_DIFFER,
    Int4Scheme,
    awq,
    gptq,
    pack_quantized,
)

KEY = "quantization_config"
BESIDE = ("quantize_config.json", "quant_config.json")      # of AutoGPTQ and of AutoAWQ
# Names for the same thing, in the key and in these files.
_SAME = (("quant_method",), ("bits", "w_bit"), ("group_size", "q_group_size"), FORM_KEYS, ("sym",), ("desc_act",),
         ("zero_point",), ("version",))
Scheme = Fp8Scheme | Int4Scheme


def _compressed(keys: KeyReader) -> Scheme:
    return pack_quantized(keys) if keys.data.get("format") == "pack-quantized" else compressed_tensors(keys)


METHODS: dict[str, Callable[[KeyReader], Scheme]] = {
    "fp8": fine_grained, "compressed-tensors": _compressed, "awq": awq, "gptq": gptq}


def read_quantization(config: KeyReader, beside: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Scheme | None:
    """What the key `quantization_config` says; None without it. `beside`: what stands in the files BESIDE. Raises
    ConfigError for schemes that are not read, and where another file contradicts the key."""
    if KEY not in config:
        config.ignore(KEY, "null")
        return None
    data = config.data[KEY]
    method = data.get("quant_method", data) if isinstance(data, dict) else data
    if not isinstance(data, dict) or not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"{config.file}: {KEY} = {shorten(method)} is not supported; supported: fp8, the fp8 and 4-bit "
                          "schemes of compressed-tensors, and awq and gptq of 4 bits. Give such a checkpoint, the "
                          "unquantised one, or a GGUF file")
    config.take(KEY)
    keys = KeyReader(config.file, data, config.audit, config.allowed, f"{KEY}.")
    keys.take("quant_method")
    scheme = METHODS[method](keys)
    keys.finish()
    for name, other in beside.items():
        _require_agreement(keys, method, name, other)
    return scheme


def _require_agreement(keys: KeyReader, method: str, name: str, other: Mapping[str, Any]) -> None:
    """Compare the key with what the file `name` says of the same things."""
    for known in _SAME:
        default = FIRST_FORM if method == "gptq" and known == FORM_KEYS else None
        own, stated = _first(keys.data, known, default)
        key, value = _first(other, known, None)
        if None in (stated, value) or str(stated).lower() == str(value).lower():
            continue
        why = f" ({ZEROS_DIFFER})" if known == FORM_KEYS else ""
        raise ConfigError(f"{keys.file} and {name} contradict each other: {keys.prefix}{own} = {shorten(stated)} and "
                          f"{key} = {shorten(value)}{why}; correct the one that is wrong, or remove it")


def _first(data: Mapping[str, Any], known: tuple[str, ...], default: Any) -> tuple[str, Any]:
    """The first of these keys that is there, and its value."""
    return next(((key, data[key]) for key in known if data.get(key) is not None), (known[0], default))
