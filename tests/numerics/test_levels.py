"""Every optimisation level and random subsets of the optional passes keep the numbers: the real pipeline from export to
code, on a tiny model with biases, against `-O0`, and `-O0` against NumPy. Kernels are plain loops.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
from relaxpack.compile.kernels import kernel_provider
from relaxpack.compile.lowering import Lowered, lower_model
from relaxpack.compile.weights import ParameterMaker
from relaxpack.kernel_spec import KernelProvider
from relaxpack.passes.config import HIGHEST_LEVEL, ON_REQUEST, OPTIONAL, PipelineConfig, left_out
from relaxpack.relax_models.checkpoint import Checkpoint, open_checkpoint
from relaxpack.relax_models.export import BuildLimits
from relaxpack.target import parse_target
from relaxpack.weight_format import FORMATS
from tests.helpers.jit_model import jit_runner
from tests.helpers.numerics import Tape, decode_logits, prefill_logits, run, tapes
from tests.helpers.plain_kernels import PlainKernels
from tests.helpers.tiny_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.reference.numpy_decoder import forward

LIMITS = BuildLimits(max_context=64, max_batch=2, prefill_chunk=32, page_size=8)
IDS = np.random.default_rng(4).integers(0, VOCAB_SIZE, 40).tolist()
PLAIN = PlainKernels()
TOLERANCE = 2e-5   # float32; only the order of sums differs
# (left out, on request), drawn from all optional passes.
SUBSETS = [(frozenset(random.Random(seed).sample(sorted(OPTIONAL), 3 + seed % 4)),
            frozenset(random.Random(seed).sample(list(ON_REQUEST), seed % 3))) for seed in range(6)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_checkpoint(tmp_path_factory.mktemp("m") / "m", "llama_bias"))


def lowered_without(checkpoint: Checkpoint, disabled: frozenset[str], limits: BuildLimits = LIMITS,
                    enabled: frozenset[str] = frozenset(), provider: KernelProvider = PLAIN) -> Lowered:
    formats = {name: FORMATS["f32"] for name, info in checkpoint.tensors.items() if len(info.shape) == 2}
    return lower_model(checkpoint.config, limits, parse_target("cpu"), provider, formats, "float32", "float32",
                       PipelineConfig(disabled, enabled=enabled))


def logits(checkpoint: Checkpoint, lowered: Lowered, provider: KernelProvider = PLAIN) -> np.ndarray:
    """All positions by prefill, then the last ones one by one, then the last row of a prefill alone."""
    config, maker = checkpoint.config, ParameterMaker(checkpoint, provider)
    runner = jit_runner(config, LIMITS, lowered.executable, [maker.make(p.recipe, p.dtype) for p in lowered.parameters], 16)
    (tape,) = tapes(runner, [IDS])
    last = Tape(runner, IDS, tape.page_ids)
    parts = [prefill_logits(tape, 32), decode_logits(tape, len(IDS))]
    return np.concatenate([*parts, run(runner, [last.step(7, "last")])])


@pytest.fixture(scope="module")
def plain(checkpoint: Checkpoint) -> np.ndarray:
    return logits(checkpoint, lowered_without(checkpoint, left_out(0)))


def test_level_0_is_right(checkpoint: Checkpoint, plain: np.ndarray) -> None:
    expected = forward(checkpoint, IDS, LIMITS.max_context)
    np.testing.assert_allclose(plain, np.concatenate([expected, expected[6:7]]), rtol=0, atol=2e-4)


@pytest.mark.parametrize("level", range(1, HIGHEST_LEVEL + 1))
def test_levels(checkpoint: Checkpoint, plain: np.ndarray, level: int) -> None:
    lowered = lowered_without(checkpoint, left_out(level))
    np.testing.assert_allclose(logits(checkpoint, lowered), plain, rtol=0, atol=TOLERANCE)
    assert lowered.explanation["disabled"] == sorted(left_out(level))


@pytest.mark.parametrize("disabled, enabled", SUBSETS, ids=lambda names: " ".join(sorted(names)) or "none")
def test_random_subsets(checkpoint: Checkpoint, plain: np.ndarray, disabled: frozenset[str],
                        enabled: frozenset[str]) -> None:
    lowered = lowered_without(checkpoint, disabled, enabled=enabled)
    ran = {p["name"] for p in lowered.explanation["passes"]}
    assert not ran & (disabled - {"FuseEpilogues"}) and enabled <= ran
    np.testing.assert_allclose(logits(checkpoint, lowered), plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("enabled", [frozenset[str](), frozenset({"FuseResidual"})], ids=["", "FuseResidual"])
def test_norms_inside_matmuls(checkpoint: Checkpoint, plain: np.ndarray, enabled: frozenset[str]) -> None:
    """With nothing else but what it needs. Only the norm that no matmul stands before keeps a kernel of its own."""
    others = frozenset(OPTIONAL) - {"FuseEpilogues", "FuseAddNorm", "FuseNormLinear"}
    lowered = lowered_without(checkpoint, others, enabled=enabled)
    kernels = Counter(row["kernel"] for row in lowered.explanation["steps"]["decode"])
    hidden, layers = checkpoint.config.hidden_size, checkpoint.config.num_layers
    assert kernels["rms_norm"] == 1 and not kernels["add_rms_norm"]
    assert kernels[f"prepare_{hidden}"] == 2 * layers       # behind output and down
    np.testing.assert_allclose(logits(checkpoint, lowered), plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", list(ON_REQUEST))
def test_each_pass_on_request(checkpoint: Checkpoint, plain: np.ndarray, name: str) -> None:
    """Layers have two norms and two sums each; the last norm and a tied head share a table with the embedding."""
    lowered = lowered_without(checkpoint, frozenset({"FuseNormLinear"}), enabled=frozenset({name}))
    kernels = [row["kernel"] for row in lowered.explanation["steps"]["decode"]]
    layers = checkpoint.config.num_layers
    if name == "FuseResidual":
        assert not any("add_rms_norm" in kernel for kernel in kernels)
    elif name in ("FuseHeadSample", "SpreadDecode"):    # nothing is sampled on a CPU, and no bucket has a graph
        assert not any("head" in kernel or "prefix" in kernel for kernel in kernels)
    else:
        folded = [p.name for p in lowered.parameters if "*norm" in p.name]
        assert len(folded) == 2 * layers + (not checkpoint.config.tie_embeddings)
        assert any(f"{len(folded)} norm weights folded" in note for note in lowered.explanation["notes"])
    np.testing.assert_allclose(logits(checkpoint, lowered), plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "gemma"])
def test_families(tmp_path: Path, family: str) -> None:
    """Windows, biases of queries alone, norms of heads (which the plain kernels lack): `-O0` against every pass there is.
    test_models.py compares the default with references."""
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "m", family))
    provider = kernel_provider(parse_target("cpu")) if family == "qwen3" else PLAIN
    plain = logits(checkpoint, lowered_without(checkpoint, left_out(0), provider=provider), provider)
    # Gemma's logits are so large that the other order of roundings in a folded norm is more than the tolerance.
    disabled = frozenset({"FuseNormLinear"} if family == "gemma" else ())
    every = lowered_without(checkpoint, disabled, enabled=frozenset(ON_REQUEST), provider=provider)
    np.testing.assert_allclose(logits(checkpoint, every, provider), plain, rtol=0, atol=TOLERANCE)


def test_the_rope_table_is_no_part_of_the_library(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """At 32768 positions of 16 numbers it takes 2 MiB, once for both functions."""
    long = replace(LIMITS, max_context=32768)
    sizes = {}
    for disabled in (frozenset[str](), frozenset({"ShareRopeTable"})):
        lowered = lowered_without(checkpoint, disabled, long)
        lowered.executable.export_library(str(tmp_path / "lib.so"))
        tables = [p.bytes for p in lowered.parameters if p.name == "rope_table"]
        sizes[disabled] = (tmp_path / "lib.so").stat().st_size, sum(tables)
    (with_pass, table), (without, none) = sizes.values()
    assert (table, none) == (32768 * 16 * 4, 0)
    assert table <= without - with_pass < 1.1 * table
