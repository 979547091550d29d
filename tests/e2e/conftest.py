"""Bundles that end-to-end tests share; each is built once, whichever worker asks first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.shared_builds import built_once
from tests.helpers.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights: every part of a real bundle, context 128, batches of 4."""
    from relaxpack.compile import BuildOptions, build_bundle

    def build(path: Path) -> None:
        checkpoint = write_checkpoint(path.parent / "checkpoint")
        build_bundle(checkpoint, path, options=BuildOptions(max_context=128, max_batch=4, prefill_chunk=32))

    return built_once(tmp_path_factory, "tiny.bundle", build)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`smollm2(weights)`: a bundle of SmolLM2-135M-Instruct, the real model, with that weight option; it chats
    and embeds."""
    from relaxpack.compile import BuildOptions, build_bundle
    from relaxpack.errors import CheckpointError
    from relaxpack.relax_models.checkpoint import packaged_file

    try:
        packaged_file("smollm2")
    except CheckpointError as error:
        pytest.skip(str(error))

    def bundle(weights: str) -> Path:
        options = BuildOptions(weights=weights, max_context=1024, embeddings="also")
        return built_once(tmp_path_factory, f"{weights}.bundle", lambda path: build_bundle("smollm2", path, options=options))

    return bundle
