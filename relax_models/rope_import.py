"""RoPE keys of config.json, old and new spelling, read into one `RopeConfig`.

Knows `rope_theta`, `rope_scaling`, `rope_parameters` (flat, or nested per layer type) and `partial_rotary_factor`.
Contradictions and unknown forms are errors; nothing falls back to an unscaled form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relaxpack.errors import ConfigError
from relaxpack.relax_models.audit import KeyReader, shorten
from relaxpack.relax_models.rope import RopeConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
_ALIASES = {"su": "longrope"}
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0  # of all four families in transformers


def read_rope(config: KeyReader, head_dim: int, max_position: int, layer_types: frozenset[str]) -> RopeConfig:
    """`layer_types`: the kinds of attention the layers really use, to choose among nested parameters."""
    old = config.take("rope_scaling", None, dict)
    new = config.take("rope_parameters", None, dict)
    if old and new and _without_theta(old) != _without_theta(new):
        raise ConfigError(f"{config.file}: rope_scaling = {shorten(old)} contradicts rope_parameters = {shorten(new)}; "
                          "remove the wrong one")
    parameters, where = (new, "rope_parameters") if new else (old or {}, "rope_scaling")
    nested = [key for key in parameters if isinstance(parameters[key], Mapping)]
    if nested:
        return _nested(config, parameters, where, head_dim, max_position, layer_types)
    return _flat(config, parameters, where, head_dim, max_position)


def _without_theta(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """One spelling for comparing the two dicts; theta has its own check."""
    plain = {k: v for k, v in parameters.items() if k not in ("rope_theta", "type", "rope_type") and v is not None}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return {**plain, "rope_type": _ALIASES.get(kind, kind)}


def _nested(config: KeyReader, parameters: Mapping[str, Any], where: str, head_dim: int, max_position: int,
            layer_types: frozenset[str]) -> RopeConfig:
    """{"full_attention": {...}, "sliding_attention": {...}}: all layers in use must rotate alike."""
    unknown = sorted(set(parameters) - set(LAYER_TYPES))
    if unknown:
        raise ConfigError(f"{config.file}: {where} has the unknown layer type {unknown[0]!r} = "
                          f"{shorten(parameters[unknown[0]])}; known: {', '.join(LAYER_TYPES)}")
    found: dict[str, RopeConfig] = {}
    for layer_type in LAYER_TYPES:
        if parameters.get(layer_type) is not None:
            found[layer_type] = _flat(config, parameters[layer_type], f"{where}.{layer_type}", head_dim, max_position)
    missing = sorted(layer_types - set(found))
    if missing:
        raise ConfigError(f"{config.file}: {where} says nothing about the layer type {missing[0]!r} that layers use; "
                          f"it has {', '.join(found)}")
    used = {found[t] for t in layer_types}
    if len(used) > 1:
        raise ConfigError(f"{config.file}: {where} rotates sliding and full layers differently "
                          f"({shorten(parameters)}); one RoPE for all layers is supported")
    return used.pop()


def _flat(config: KeyReader, parameters: Mapping[str, Any], where: str, head_dim: int,
          max_position: int) -> RopeConfig:
    reader = KeyReader(config.file, parameters, config.audit, config.allowed, prefix=f"{where}.")
    kind = _kind(reader)
    theta = _agreed(config, reader, "rope_theta")
    if theta is None:
        theta = DEFAULT_THETA
        config.audit.warn(f"{config.file}: gives no rope_theta; using {theta:g}, the default of this architecture")
    partial = _agreed(config, reader, "partial_rotary_factor")
    fields: dict[str, Any] = {}
    if kind != "default":
        # Ratio of contexts where the dict gives no factor: Phi-3 style longrope, DeepSeek style yarn.
        factor = reader.number("factor", None)
        if kind in ("llama3", "yarn", "longrope"):
            fields["original_max_position"] = _original(config, reader, kind, max_position)
            if factor is None and kind != "llama3":
                factor = max_position / fields["original_max_position"]
        if factor is None:
            raise ConfigError(f"{config.file}: {where} of kind {kind!r} has no factor: {shorten(parameters)}")
        fields["factor"] = factor
    if kind == "llama3":
        fields["low_freq_factor"] = reader.number("low_freq_factor")
        fields["high_freq_factor"] = reader.number("high_freq_factor")
    if kind == "yarn":
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0), ("mscale", 0.0), ("mscale_all_dim", 0.0)):
            fields[name] = reader.number(name, default)
        fields["truncate"] = reader.flag("truncate", True)
    if kind in ("yarn", "longrope"):
        fields["attention_factor"] = reader.number("attention_factor", None)
        reader.ignore("finetuned", "says how the model was made, not how it is run")
    if kind == "longrope":
        for key, name in (("short_factor", "short_factors"), ("long_factor", "long_factors")):
            values = reader.take(key, kind=list)
            if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and v > 0 for v in values):
                raise ConfigError(f"{config.file}: {where}.{key} must be a list of positive numbers, got "
                                  f"{shorten(values)}")
            fields[name] = tuple(float(v) for v in values)
    reader.finish()
    return RopeConfig(kind, theta, int(head_dim * (1.0 if partial is None else partial)), max_position, **fields)


def _kind(reader: KeyReader) -> str:
    """`rope_type` and the older `type` are one thing; "su" is an old name of longrope."""
    given = {key: reader.take(key, None, str) for key in ("rope_type", "type")}
    kinds = {_ALIASES.get(kind, kind) for kind in given.values() if kind is not None}
    if len(kinds) > 1:
        raise ConfigError(f"{reader.file}: {reader.prefix}rope_type = {given['rope_type']!r} contradicts "
                          f"{reader.prefix}type = {given['type']!r}; remove the wrong one")
    real = {k for k, v in reader.data.items() if v is not None} - {"rope_theta", "partial_rotary_factor"}
    if not kinds and real:
        raise ConfigError(f"{reader.file}: {reader.prefix[:-1]} = {shorten(dict(reader.data))} does not say its kind; "
                          f"add rope_type, one of: {', '.join(_KINDS)}")
    kind = kinds.pop() if kinds else "default"
    if kind not in _KINDS:
        raise ConfigError(f"{reader.file}: {reader.prefix}rope_type = {kind!r} is not supported; supported: "
                          f"{', '.join(_KINDS)}")
    return kind


def _agreed(config: KeyReader, reader: KeyReader, key: str) -> float | None:
    """A value that may stand beside the RoPE dict, in it, or in both if equal."""
    outside, inside = config.number(key, None), reader.number(key, None)
    if outside is not None and inside is not None and outside != inside:
        raise ConfigError(f"{config.file}: {key} = {outside:g} contradicts {reader.prefix}{key} = {inside:g}; "
                          "remove the wrong one")
    return inside if outside is None else outside


def _original(config: KeyReader, reader: KeyReader, kind: str, max_position: int) -> int:
    key = "original_max_position_embeddings"
    value = _agreed(config, reader, key)
    if value is None:
        if kind == "longrope":
            raise ConfigError(f"{config.file}: longrope needs {key}, beside {reader.prefix[:-1]} or in it")
        config.audit.warn(f"{config.file}: {reader.prefix[:-1]} gives no {key}; using max_position_embeddings = "
                          f"{max_position}")
        return max_position
    return int(value)
