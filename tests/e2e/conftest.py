"""Bundles that end-to-end tests share; each is built once a session."""

from __future__ import annotations

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
