"""Weights from files to a device, over host memory: every byte arrives whatever the sizes, and progress adds up."""

from __future__ import annotations

import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import relaxpack.tvm_setup  # noqa: F401
import tvm
from relaxpack.dist.bundle import Bundle
from relaxpack.dist.params import TensorRegion
from relaxpack.errors import BundleError
from relaxpack.runtime import cuda_memory
from relaxpack.runtime.upload import CHUNKS, upload
from tests.helpers.bundles import parameters, write_bundle
from tests.helpers.captured_model import host_memory


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_memory(monkeypatch)


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 2**32, (100, 7), dtype=np.uint32), rng.standard_normal(1).astype(np.float32),
            rng.standard_normal((300, 64)).astype(ml_dtypes.bfloat16), np.zeros((0, 4), np.float16),
            rng.standard_normal((64, 64)).astype(np.float16)]


def raw(tensor: object) -> bytes:
    view = tensor._create_view([int(np.prod(tensor.shape)) * tensor.dtype.itemsize], "uint8")  # type: ignore[attr-defined]
    return bytes(view.numpy())


@pytest.mark.parametrize("chunk", [64, 1000, 4096, 1 << 20])
def test_every_byte_arrives(tmp_path: Path, chunk: int) -> None:
    file = tmp_path / "weights"
    given: list[TensorRegion | np.ndarray] = []
    with file.open("wb") as f:
        for i, array in enumerate(arrays()):
            f.write(b"?" * 13)
            given.append(TensorRegion(f"p{i}", array.dtype.name, array.shape, file, f.tell()) if i % 2 == 0 else array)
            f.write(array.tobytes())
    seen: list[tuple[int, int]] = []
    done = upload(given, tvm.cpu(), lambda *numbers: seen.append(numbers), chunk)
    total = sum(array.nbytes for array in arrays())
    assert done.bytes == total and done.seconds > 0 and done.gigabytes_per_second > 0
    for tensor, array in zip(done.tensors, arrays(), strict=True):
        assert tuple(tensor.shape) == array.shape and str(tensor.dtype) == array.dtype.name
        if array.nbytes:
            assert raw(tensor) == array.tobytes()
    counts = [count for count, _ in seen]
    assert counts == sorted(counts) and counts[-1] == total and {all_ for _, all_ in seen} == {total}


@pytest.mark.parametrize("name", ["x.bundle", "x.rpk"])
def test_both_forms_of_a_bundle(tmp_path: Path, name: str) -> None:
    write_bundle(tmp_path / name)
    bundle = Bundle.open(tmp_path / name)
    entry = bundle.manifest.targets[0]
    params = bundle.open_params(entry)
    done = upload([params.region(tensor) for tensor in entry.param_order], tvm.cpu(), chunk_bytes=100)
    wanted = [array for buffers in parameters().values() for array in buffers.values()]
    assert [raw(tensor) for tensor in done.tensors] == [array.tobytes() for array in wanted]


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    region = TensorRegion("model.norm", "float32", (64,), tmp_path / "short", 0)
    with pytest.raises(BundleError, match=r"short ends inside the parameter model.norm"):
        upload([region], tvm.cpu())


def test_a_chunk_is_filled_again_only_after_it_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that happen as late as a device may do them: when somebody waits for them."""
    pending: dict[int, list[tuple[int, int, int]]] = {}
    lock = threading.Lock()

    def late(destination: int, source: int, size: int, kind: int, what: str) -> None:
        pending.setdefault(-1, []).append((destination, source, size))

    class Event:
        def record(self) -> None:
            pending[id(self)] = pending.pop(-1, [])

        def wait(self) -> None:
            import ctypes

            with lock:
                for copy in pending.pop(id(self), []):
                    ctypes.memmove(*copy)

    def synchronize() -> None:
        for event in made:
            event.wait()

    made: list[Event] = []
    monkeypatch.setattr(cuda_memory, "_copy", late)
    monkeypatch.setattr(cuda_memory, "Event", lambda: made.append(Event()) or made[-1])
    monkeypatch.setattr(cuda_memory, "synchronize", synchronize)
    array = np.arange(64 * 40 * CHUNKS, dtype=np.uint8)
    done = upload([array], tvm.cpu(), chunk_bytes=64)
    np.testing.assert_array_equal(done.tensors[0].numpy(), array)
