"""`quantization_config` of Hugging Face folders: fp8 and 4-bit weights are read, all other schemes refused by name.

What each scheme's keys mean is in `fp8_import.py` and `int4_import.py`; the tensors are read by `fp8_tensors.py` and
`int4_tensors.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from relaxpack.errors import ConfigError
from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.relax_models.fp8_import import Fp8Scheme, compressed_tensors, fine_grained
from relaxpack.relax_models.int4_import import Int4Scheme, awq, gptq, pack_quantized

KEY = "quantization_config"
Scheme = Fp8Scheme | Int4Scheme


def _compressed(keys: KeyReader) -> Scheme:
    return pack_quantized(keys) if keys.data.get("format") == "pack-quantized" else compressed_tensors(keys)


METHODS: dict[str, Callable[[KeyReader], Scheme]] = {
    "fp8": fine_grained, "compressed-tensors": _compressed, "awq": awq, "gptq": gptq}


def read_quantization(config: KeyReader) -> Scheme | None:
    """What the key `quantization_config` says; None without it. Raises ConfigError for schemes that are not read."""
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
    return scheme
