"""Bundles that end-to-end tests share; each is built once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.tiny_checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights: every part of a real bundle, context 128, batches of 4."""
    from relaxpack.compile import BuildOptions, build_bundle

    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder / "checkpoint")
    build_bundle(folder / "checkpoint", folder / "tiny.bundle",
                 options=BuildOptions(max_context=128, max_batch=4, prefill_chunk=32))
    return folder / "tiny.bundle"


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
    folder = tmp_path_factory.mktemp("smollm2")

    def bundle(weights: str) -> Path:
        path = folder / f"{weights}.bundle"
        if not path.exists():
            build_bundle("smollm2", path, options=BuildOptions(weights=weights, max_context=1024, embeddings="also"))
        return path

    return bundle
