"""The key of a bundle names what went in by content: equal builds have equal keys, and one number in one tensor, one word
of the chat template or one config value makes another.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.compile.manifest import source_digest
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.target import TargetSpec
from tests.helpers.tiny_checkpoints import CHAT_TEMPLATE, make_config, make_tensors, write_checkpoint

OPTIONS = BuildOptions(max_context=32, max_batch=1, prefill_chunk=8, level=0)
SHAPE = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2,
         "num_key_value_heads": 1}


def key(folder: Path, tensors: dict[str, np.ndarray]) -> str:
    """Files of one name and one size in every call."""
    write_checkpoint(folder / "model", tensors=tensors, **SHAPE)
    return build_bundle(folder / "model", folder / "x.bundle", "cpu:x86-64-v3", OPTIONS).manifest.key


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    return make_tensors(make_config("llama", **SHAPE))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, np.ndarray]) -> str:
    return key(tmp_path_factory.mktemp("first"), tensors)


def test_equal_checkpoints_have_equal_keys(tmp_path: Path, tensors: dict[str, np.ndarray], first: str) -> None:
    assert key(tmp_path, tensors) == first


def test_a_fine_tune_has_another_key(tmp_path: Path, tensors: dict[str, np.ndarray], first: str) -> None:
    tuned = {name: value.copy() for name, value in tensors.items()}
    tuned["model.layers.0.mlp.down_proj.weight"][3, 5] += 0.25
    assert key(tmp_path, tuned) != first


def test_text_and_config_count(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Whatever the parameters are: compiled code and templates are made of these."""
    built = [SimpleNamespace(plan=SimpleNamespace(spec=TargetSpec("cpu", "x86-64-v3")), digests={"p": "0" * 64})]

    def digest(folder: Path, template: str = CHAT_TEMPLATE, **config: object) -> str:
        write_checkpoint(folder / "model", tensors=tensors, chat_template=template, **{**SHAPE, **config})
        return source_digest(open_checkpoint(folder / "model"), built)  # type: ignore[arg-type]

    plain = digest(tmp_path / "a")
    assert plain == digest(tmp_path / "b")
    others = {digest(tmp_path / "c", CHAT_TEMPLATE.replace("role", "name")), digest(tmp_path / "d", rms_norm_eps=1e-6)}
    assert len({plain, *others}) == 3
