"""Quantises float weights `[N, K]` into the canonical form: what `--weights q4` (q4_1), `q4-128` (q4_128), `q8` (q8_0)
and `fp8` do.

Round to nearest within groups along K, scales rounded to their dtype before the codes are chosen, so that the codes fit
the numbers the kernel will really use. Checkpoints that are quantised already never come through here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np

from relaxpack.errors import CompileError
from relaxpack.weight_format import E4M3_LARGEST, FORMATS, LARGEST_ZERO, QuantizedTensor, WeightFormat

# What the command line's names mean.
WEIGHT_CHOICES = {"q4": FORMATS["q4_1"], "q4-128": FORMATS["q4_128"], "q8": FORMATS["q8_0"], "fp8": FORMATS["fp8"]}

_PARTS_OF_RANGE = (1.0, 0.95, 0.9, 0.85, 0.8)
_CHUNK = 1 << 22  # weights converted at a time: bounds the float32 temporaries


def quantize(array: np.ndarray, format: WeightFormat) -> QuantizedTensor:
    """`array`: any float dtype, `[N, K]` with K a multiple of the group size (any K for formats with long groups); q4_0,
    q4_1, q4_128, q8_0, fp8 or fp8_block."""
    if format.e4m3:
        return _quantize_e4m3(array, format)
    if format.name not in _GROUP_CODERS:
        raise CompileError(f"cannot quantise to {format.name}; possible: {', '.join([*_GROUP_CODERS, 'fp8', 'fp8_block'])}")
    if array.ndim == 2 and format.long_groups and array.shape[1] % format.group_size:
        return _short_group(array, format)
    if array.ndim != 2 or array.shape[1] % format.group_size:
        raise CompileError(f"cannot quantise a weight of shape {list(array.shape)} to {format.name}: it needs two "
                           f"dimensions and a multiple of {format.group_size} columns; build with --weights f16")
    n, k = array.shape
    groups = k // format.group_size
    codes = np.empty((n, k), np.int8 if format.signed else np.uint8)
    scales = np.empty((n, groups), np.float16)
    minimums = np.empty((n, groups), np.float16) if format.minimum == "stored" else None
    zeros = np.empty((n, groups), np.uint8) if format.zeros else None
    step = max(1, _CHUNK // max(k, 1))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        x = array[rows].astype(np.float32).reshape(-1, format.group_size)
        limit = np.abs(x).max(initial=0.0)
        if not limit <= 65504:  # float16's largest; also catches NaN
            raise CompileError(f"cannot quantise to {format.name}: the weight holds {limit}, scales are float16")
        c, s, m = _GROUP_CODERS[format.name](x)
        codes[rows], scales[rows] = c.reshape(-1, k), s.reshape(-1, groups)
        for least in (minimums, zeros):
            if least is not None:
                assert m is not None
                least[rows] = m.reshape(-1, groups)
    return QuantizedTensor(format, codes, scales, minimums, zeros)


def _short_group(array: np.ndarray, format: WeightFormat) -> QuantizedTensor:
    """The last group of each row is short: zeros at its end change nothing in formats whose range includes zero."""
    k = array.shape[1]
    whole = quantize(np.pad(array, ((0, 0), (0, -k % format.group_size))), format)
    return replace(whole, codes=np.ascontiguousarray(whole.codes[:, :k]))


Coded = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # codes [g, size], float16 scales [g], minimums or zeros [g]


def _divide(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """x / scale per group, 0 where the scale vanished."""
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)
    return x * inverse[:, None]


def _q4_0(x: np.ndarray) -> Coded:
    # The value farthest from zero becomes code 0, which reaches 8 steps; the other side has only 7.
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)[:, 0]
    scale = (peak / -8).astype(np.float16)
    codes = np.clip(np.rint(_divide(x, scale.astype(np.float32))) + 8, 0, 15)
    return codes.astype(np.uint8), scale, None


def _q8_0(x: np.ndarray) -> Coded:
    scale = (np.abs(x).max(axis=1) / 127).astype(np.float16)
    codes = np.clip(np.rint(_divide(x, scale.astype(np.float32))), -127, 127)
    return codes.astype(np.int8), scale, None


def _q4_1(x: np.ndarray) -> Coded:
    """From the group's range, then twice a least-squares fit of scale and minimum to the codes, kept where it helps."""
    low, high = x.min(axis=1), x.max(axis=1)
    codes, scale, minimum = _code_q4_1(x, (high - low) / 15, low)
    error = _squared_error(x, codes, scale, minimum)
    for _ in range(2):
        code_mean, x_mean = codes.mean(axis=1), x.mean(axis=1)
        centred = codes - code_mean[:, None]
        spread = (centred * centred).sum(axis=1)
        slope = np.divide((centred * x).sum(axis=1), spread, out=np.zeros_like(spread), where=spread != 0)
        candidate = _code_q4_1(x, slope, x_mean - slope * code_mean)
        candidate_error = _squared_error(x, *candidate)
        better = candidate_error < error
        codes = np.where(better[:, None], candidate[0], codes)
        scale, minimum = np.where(better, candidate[1], scale), np.where(better, candidate[2], minimum)
        error = np.where(better, candidate_error, error)
    return codes.astype(np.uint8), scale.astype(np.float16), minimum.astype(np.float16)


def _code_q4_1(x: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (as float32) for scale and minimum after their rounding to float16, returned as float32."""
    scale, minimum = (v.astype(np.float16).astype(np.float32) for v in (scale, minimum))
    return np.clip(np.rint(_divide(x - minimum[:, None], scale)), 0, 15), scale, minimum


def _squared_error(x: np.ndarray, codes: np.ndarray, scale: np.ndarray, minimum: np.ndarray) -> np.ndarray:
    return np.square(codes * scale[:, None] + minimum[:, None] - x).sum(axis=1)


def _q4_128(x: np.ndarray) -> Coded:
    """The range of the group and zero, or a part of it where clipping its ends leaves the smaller squared error."""
    low, high = np.minimum(x.min(axis=1), 0), np.maximum(x.max(axis=1), 0)
    tried = [_code_q4_128(x, low * np.float32(part), high * np.float32(part)) for part in _PARTS_OF_RANGE]
    best = np.stack([error for _, _, _, error in tried]).argmin(axis=0)
    codes, scales, zeros = (np.stack([one[i] for one in tried])[best, np.arange(len(x))] for i in range(3))
    return codes, scales, zeros


def _code_q4_128(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale and zero for the range from `low` to `high`, and the squared error."""
    scale = ((high - low) / 15).astype(np.float16)
    wide = scale.astype(np.float32)
    zero = np.clip(np.rint(_divide(-low[:, None], wide)), 0, LARGEST_ZERO)
    codes = np.clip(np.rint(_divide(x, wide)) + zero, 0, 15)
    error = np.square((codes - zero) * wide[:, None] - x).sum(axis=1)
    return codes.astype(np.uint8), scale, zero[:, 0].astype(np.uint8), error


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """uint8 codes of the nearest e4m3 numbers, half to even; what is beyond the largest becomes the largest."""
    return np.clip(x, -E4M3_LARGEST, E4M3_LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _quantize_e4m3(array: np.ndarray, format: WeightFormat) -> QuantizedTensor:
    """The largest value of a group becomes the largest e4m3 number. A group whose scale would be a subnormal float32
    vanishes."""
    if array.ndim != 2:
        raise CompileError(f"cannot quantise a weight of shape {list(array.shape)} to {format.name}: it needs two "
                           "dimensions")
    n, k = array.shape
    size = k if format.groups(k) == 1 else format.group_size
    codes, scales = np.empty((n, k), np.uint8), np.empty((n, format.groups(k)), np.float32)
    step = max(1, _CHUNK // max(k, 1))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        for group in range(scales.shape[1]):
            columns = slice(group * size, min((group + 1) * size, k))
            x = array[rows, columns].astype(np.float32)
            peak = np.abs(x).max(axis=1, initial=0.0)
            if not np.isfinite(peak).all():
                raise CompileError(f"cannot quantise to {format.name}: the weight holds {peak[~np.isfinite(peak)][0]}")
            scale = peak / np.float32(E4M3_LARGEST)
            scale[scale < np.finfo(np.float32).tiny] = 0
            scales[rows, group] = scale
            codes[rows, columns] = to_e4m3(np.divide(x, scale[:, None], out=np.zeros_like(x), where=scale[:, None] != 0))
    return QuantizedTensor(format, codes, scales)


_GROUP_CODERS: dict[str, Callable[[np.ndarray], Coded]] = {"q4_1": _q4_1, "q4_128": _q4_128, "q4_0": _q4_0, "q8_0": _q8_0}
