"""Rotary position embedding: the parameters of every scaling form and the frequencies they give.

`RopeConfig` is ours already; `families.py` (config.json) and `gguf_import.py` (GGUF metadata) fill it. Frequencies are
computed in float64 and rounded once; they equal transformers' `ROPE_INIT_FUNCTIONS` to float32 rounding. Building the
cos/sin table and applying it is not done here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from relaxpack.errors import ConfigError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


@dataclass(frozen=True)
class RopeConfig:
    """`rotary_dim` leading dimensions of each head are rotated. `original_max_position` is the context the model was
    trained with before scaling. Fields that a kind does not use keep their defaults.

    Kind "factors" divides each frequency by a stored factor: how a GGUF stores Llama 3's scaling (`rope_freqs`).
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position: int
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float | None = None    # yarn, longrope: None means the published formula
    low_freq_factor: float = 1.0             # llama3
    high_freq_factor: float = 4.0            # llama3
    beta_fast: float = 32.0                  # yarn
    beta_slow: float = 1.0                   # yarn
    mscale: float = 0.0                      # yarn
    mscale_all_dim: float = 0.0              # yarn
    truncate: bool = True                    # yarn: round the ramp's ends to whole dimensions
    short_factors: tuple[float, ...] = ()    # longrope; "factors" keeps its divisors here
    long_factors: tuple[float, ...] = ()     # longrope

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"RoPE kind {self.kind!r} is not supported; supported: {', '.join(KINDS)}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ConfigError(f"RoPE needs an even number of rotated dimensions, got {self.rotary_dim}")
        if not self.theta > 0:
            raise ConfigError(f"rope_theta must be positive, got {self.theta}")
        if not self.factor > 0:
            raise ConfigError(f"RoPE factor must be positive, got {self.factor}")
        if self.kind in ("llama3", "yarn", "longrope") and self.original_max_position < 1:
            raise ConfigError(f"RoPE kind {self.kind!r} needs original_max_position_embeddings")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(f"llama3 RoPE needs low_freq_factor < high_freq_factor, got {self.low_freq_factor} "
                              f"and {self.high_freq_factor}")
        if self.kind == "dynamic" and self.rotary_dim < 4:
            raise ConfigError(f"dynamic RoPE needs at least 4 rotated dimensions, got {self.rotary_dim}")
        lists = {"longrope": ("short_factors", "long_factors"), "factors": ("short_factors",)}
        for name in lists.get(self.kind, ()):
            count = len(getattr(self, name))
            if count != self.rotary_dim // 2:
                raise ConfigError(f"RoPE kind {self.kind!r}: {name} has {count} values, needs {self.rotary_dim // 2} "
                                  f"(half of {self.rotary_dim} rotated dimensions)")


def inv_freq(rope: RopeConfig, max_context: int) -> tuple[np.ndarray, float]:
    """Frequencies float32 `[rotary_dim / 2]` (radians per position) and the factor cos and sin are multiplied by.

    What depends on the length is decided here, once, for the longest sequence `max_context` (tokens) the build
    allows: dynamic scales its base when that exceeds `max_position`, longrope takes its long factors when it exceeds
    `original_max_position`.
    """
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    base = rope.theta
    if rope.kind == "dynamic" and max_context > rope.max_position:
        stretch = rope.factor * max_context / rope.max_position - (rope.factor - 1)
        base *= stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    plain = 1.0 / base ** exponent
    attention_factor = 1.0
    match rope.kind:
        case "linear":
            plain = plain / rope.factor
        case "factors":
            plain = plain / np.asarray(rope.short_factors, np.float64)
        case "llama3":
            plain = _llama3(rope, plain)
        case "yarn":
            plain, attention_factor = _yarn(rope, plain), _yarn_attention_factor(rope)
        case "longrope":
            long = max_context > rope.original_max_position
            plain = plain / np.asarray(rope.long_factors if long else rope.short_factors, np.float64)
            attention_factor = _longrope_attention_factor(rope)
    return plain.astype(np.float32), float(attention_factor)


def _llama3(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Long wavelengths are stretched, short ones kept, those between interpolated (Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = ((rope.original_max_position / wavelength - rope.low_freq_factor)
              / (rope.high_freq_factor - rope.low_freq_factor))
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = np.where(wavelength > low, plain / rope.factor, plain)
    return np.where((wavelength <= low) & (wavelength >= high), between, stretched)


def _yarn(rope: RopeConfig, plain: np.ndarray) -> np.ndarray:
    """Interpolate slow dimensions, keep fast ones, ramp between (YaRN, arXiv 2309.00071)."""
    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    keep = 1 - np.clip((np.arange(rope.rotary_dim // 2) - low) / (high - low), 0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(by: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * by * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
