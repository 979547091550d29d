"""RoPE frequencies against transformers and against formulas written out, and reading of every spelling of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from relaxpack.errors import ConfigError
from relaxpack.relax_models.audit import ConfigAudit, KeyReader
from relaxpack.relax_models.rope import RopeConfig, inv_freq
from relaxpack.relax_models.rope_import import read_rope

HEAD_DIM, MAX_POSITION = 64, 4096
HALF = HEAD_DIM // 2
LONG = {"short_factor": [1.0 + 0.01 * i for i in range(HALF)], "long_factor": [1.0 + 0.5 * i for i in range(HALF)],
        "original_max_position_embeddings": 1024}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, all options": {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 1024, "beta_fast": 24,
                          "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024,
                               "attention_factor": 1.25},
    "longrope": {"rope_type": "longrope", **LONG},
    "longrope, factor": {"rope_type": "longrope", "factor": 16.0, **LONG},
    "longrope, attention factor": {"rope_type": "longrope", "attention_factor": 1.1, **LONG},
}


def read(**config: Any) -> tuple[RopeConfig, ConfigAudit]:
    audit = ConfigAudit()
    reader = KeyReader("config.json", config, audit)
    rope = read_rope(reader, HEAD_DIM, MAX_POSITION, frozenset({"full_attention"}))
    reader.finish()
    return rope, audit


def assert_close(ours: np.ndarray, reference: np.ndarray) -> None:
    """Both are float32 roundings of one formula; the reference also computes in float32, a few roundings deep."""
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, reference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_context", [MAX_POSITION, 512, 3 * MAX_POSITION])
@pytest.mark.parametrize("name", SCALED)
def test_equals_transformers(name: str, max_context: int) -> None:
    transformers = pytest.importorskip("transformers", reason="reference: pip install --group reference")
    pytest.importorskip("torch", reason="reference: pip install --group reference")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    reference_config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 50000.0, **SCALED[name]})
    reference, attention = ROPE_INIT_FUNCTIONS[SCALED[name]["rope_type"]](reference_config, "cpu", seq_len=max_context)
    rope, _ = read(rope_theta=50000.0, rope_scaling=SCALED[name])
    ours, our_attention = inv_freq(rope, max_context)
    assert_close(ours, reference.numpy())
    assert our_attention == pytest.approx(attention, rel=1e-12)


def test_default_equals_formula() -> None:
    ours, attention = inv_freq(RopeConfig("default", 500000.0, HEAD_DIM, MAX_POSITION), MAX_POSITION)
    assert attention == 1.0
    for i in (0, 1, 17, 31):
        assert ours[i] == np.float32(500000.0 ** (-2 * i / HEAD_DIM))


def test_llama3_equals_published_rule() -> None:
    rope, _ = read(rope_theta=50000.0, rope_scaling=SCALED["llama3"])
    ours, _ = inv_freq(rope, MAX_POSITION)
    for i, got in enumerate(ours):
        frequency = 50000.0 ** (-2 * i / HEAD_DIM)
        turns = 1024 * frequency / (2 * np.pi)
        blend = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        assert got == pytest.approx(frequency * (blend + (1 - blend) / 8.0), rel=1e-6)


def test_factors_divide() -> None:
    divisors = tuple(1.0 + i for i in range(HALF))
    rope = RopeConfig("factors", 10000.0, HEAD_DIM, MAX_POSITION, short_factors=divisors)
    plain, _ = inv_freq(RopeConfig("default", 10000.0, HEAD_DIM, MAX_POSITION), MAX_POSITION)
    assert_close(inv_freq(rope, MAX_POSITION)[0], plain / np.asarray(divisors, np.float32))


def test_partial_rotation_gives_fewer_frequencies() -> None:
    rope, _ = read(rope_theta=10000.0, partial_rotary_factor=0.5)
    ours, _ = inv_freq(rope, MAX_POSITION)
    assert rope.rotary_dim == 32 and ours.shape == (16,)
    assert ours[1] == np.float32(10000.0 ** (-2 / 32))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("spelling", ["rope_scaling/type", "rope_scaling/both", "rope_parameters/rope_type",
                                      "rope_parameters/type", "nested", "both dicts"])
def test_every_spelling_means_the_same(name: str, spelling: str) -> None:
    expected, _ = read(rope_theta=50000.0, rope_scaling=SCALED[name])
    options = {k: v for k, v in SCALED[name].items() if k != "rope_type"}
    kind = SCALED[name]["rope_type"]
    inside = {**SCALED[name], "rope_theta": 50000.0}
    configs = {
        "rope_scaling/type": {"rope_theta": 50000.0, "rope_scaling": {"type": kind, **options}},
        "rope_scaling/both": {"rope_theta": 50000.0, "rope_scaling": {"type": kind, **SCALED[name]}},
        "rope_parameters/rope_type": {"rope_parameters": inside},
        "rope_parameters/type": {"rope_parameters": {"type": kind, "rope_theta": 50000.0, **options}},
        "nested": {"rope_parameters": {"full_attention": inside,
                                       "sliding_attention": {"rope_type": "default", "rope_theta": 1.5}}},
        "both dicts": {"rope_theta": 50000.0, "rope_scaling": {"type": kind, **options}, "rope_parameters": inside},
    }
    got, _ = read(**configs[spelling])
    assert got == expected


def test_su_is_longrope() -> None:
    got, _ = read(rope_theta=10000.0, rope_scaling={"type": "su", **LONG})
    assert got.kind == "longrope" and got.factor == MAX_POSITION / 1024


def test_original_context_beside_the_dict() -> None:
    """Phi-3 style: original_max_position_embeddings at the top level."""
    inner = {k: v for k, v in LONG.items() if k != "original_max_position_embeddings"}
    got, _ = read(rope_theta=1e4, rope_scaling={"type": "longrope", **inner}, original_max_position_embeddings=1024)
    assert got == read(rope_theta=1e4, rope_scaling=SCALED["longrope"])[0]


def test_theta_of_transformers_5() -> None:
    got, audit = read(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert got.theta == 500000.0 and not audit.warnings


def test_no_theta_is_a_stated_default() -> None:
    got, audit = read()
    assert got.theta == 10000.0
    assert any("rope_theta" in w and "10000" in w for w in audit.warnings)


@pytest.mark.parametrize(("config", "words"), [
    ({"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ["10000", "500000"]),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}}, ["'yarn'", "'linear'"]),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}, ["'mrope'", "longrope"]),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}, ["mrope_section"]),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "ntk", "factor": 2.0}}, ["'ntk'", "supported"]),
    ({"rope_theta": 1e4, "rope_scaling": {"factor": 2.0}}, ["does not say its kind"]),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "linear"}}, ["no factor"]),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": "4"}}, ["factor", "'4'"]),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0, "alpha": 3}}, ["rope_scaling.alpha"]),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "longrope", **LONG, "short_factor": [1.0]}}, ["short_factor", "32"]),
    ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0},
      "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, ["4.0", "2.0", "contradicts"]),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, ["full_attention"]),
    ({"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, ["chunked_attention"]),
    ({"rope_theta": True}, ["rope_theta", "True"]),
    ({"rope_theta": 0}, ["rope_theta"]),
])
def test_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**config)
    for word in words:
        assert word in str(caught.value)


def test_layers_that_rotate_differently_are_refused() -> None:
    reader = KeyReader("config.json", {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, ConfigAudit())
    with pytest.raises(ConfigError, match="differently"):
        read_rope(reader, HEAD_DIM, MAX_POSITION, frozenset({"full_attention", "sliding_attention"}))
