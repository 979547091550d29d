"""Shards: streaming, cut by size, every dtype, readable by the safetensors package; damaged headers are refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from safetensors import safe_open

from relaxpack.dist.params import HEADER_BYTES, ParamsReader, ParamsWriter, shard_name
from relaxpack.dist.store import FolderStore
from relaxpack.errors import DamagedMemberError

DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32",
          "float64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def write(folder: Path, arrays: dict[str, np.ndarray], **options: int) -> ParamsWriter:
    writer = ParamsWriter(folder, "s", **options)  # type: ignore[arg-type]
    for name, array in arrays.items():
        writer.add(name, {"": array})
    writer.close()
    return writer


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    arrays = {}
    for index, dtype in enumerate(DTYPES):
        for shape in ((), (0, 3), (5,), (3, 64), (2, 3, 4)):
            arrays[f"t{index}.{shape}"] = np.random.default_rng(index).integers(0, 2, shape).astype(dtype)
    arrays["columns"] = np.arange(12, dtype=np.float32).reshape(3, 4).T     # not contiguous
    writer = write(tmp_path, arrays)
    reader = ParamsReader(FolderStore(tmp_path), writer.members)
    for name, array in arrays.items():
        assert reader[name].dtype == array.dtype and reader[name].shape == array.shape
        assert reader[name].tobytes() == array.tobytes()


def test_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    arrays = {f"w{i}": np.random.default_rng(i).standard_normal((i + 1, 7)).astype(np.float32) for i in range(20)}
    writer = write(tmp_path, arrays)
    with safe_open(tmp_path / writer.members[0], framework="numpy") as file:
        assert set(file.keys()) == set(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)


def test_shards_are_cut_by_size_and_by_header(tmp_path: Path) -> None:
    writer = write(tmp_path, {f"w{i}": np.zeros(256, np.uint8) for i in range(10)}, shard_bytes=1024)
    assert writer.members == [shard_name("s", i) for i in (1, 2, 3)]
    many = {f"layer.{i}." + "x" * 200: np.zeros(64, np.uint8) for i in range(1000)}
    writer = write(tmp_path / "many", many)
    assert len(writer.members) == 3
    reader = ParamsReader(FolderStore(tmp_path / "many"), writer.members)
    assert sorted(reader.names) == sorted(many) and writer.names == list(many)


def test_large_odd_tensors_end_their_shard(tmp_path: Path) -> None:
    arrays = {"a": np.zeros(128, np.uint8), "odd": np.ones(33, np.uint8), "big odd": np.ones((1 << 20) + 1, np.uint8),
              "b": np.full(128, 2, np.uint8)}
    writer = write(tmp_path, arrays)
    assert len(writer.members) == 2
    reader = ParamsReader(FolderStore(tmp_path), writer.members)
    for name, array in arrays.items():
        np.testing.assert_array_equal(reader[name], array)
    assert reader["b"].ctypes.data % 64 == reader["a"].ctypes.data % 64 == reader["big odd"].ctypes.data % 64 == 0


def test_mistakes_of_the_caller(tmp_path: Path) -> None:
    writer = ParamsWriter(tmp_path, "s")
    writer.add("a", {"": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="twice"):
        writer.add("a", {"": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="complex64"):
        writer.add("b", {"": np.zeros(3, np.complex64)})
    with pytest.raises(ValueError, match=">f4"):
        writer.add("b", {"": np.zeros(3, ">f4")})
    writer.abort()


def shard(tmp_path: Path, header: object, data: bytes = b"", length: int | None = None) -> ParamsReader:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "x").write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return ParamsReader(FolderStore(tmp_path), ["x"])


def tensor(begin: int, end: int, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_metadata_is_allowed(tmp_path: Path) -> None:
    assert shard(tmp_path, {"__metadata__": {"a": "b"}, "t": tensor(0, 2)}, b"ab")["t"].tolist() == [97, 98]


@pytest.mark.parametrize(("header", "data", "length"), [
    ({"t": tensor(0, 4)}, b"", None), ({"t": tensor(0, 4)}, b"12345", None), ({"t": tensor(1, 4)}, b"1234", None),
    ({"a": tensor(0, 3), "b": tensor(2, 4)}, b"1234", None), ({"a": tensor(0, 1), "b": tensor(2, 4)}, b"1234", None),
    ({"t": tensor(0, 4, "F32", [2])}, b"1234", None), ({"t": tensor(0, 4, "F31")}, b"1234", None),
    ({"t": tensor(0, 4, shape=[-2, -2])}, b"1234", None), ({"t": tensor(0, 4, shape=[True] * 4)}, b"1234", None),
    ({"t": tensor(0, 4, shape=[2.0, 2])}, b"1234", None), ({"t": {"dtype": "U8"}}, b"", None), ({"t": 7}, b"", None),
    ({"t": tensor(0, 4, shape=[1 << 40, 1 << 40])}, b"1234", None),
    ([], b"", None), (b"{", b"", None), (b'{"t": NaN}', b"", None), (b"", b"", 1 << 62), (b"{}", b"", 100),
    (b'{"t": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "t": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
     b"1", None),
], ids=range(19))
def test_damaged_headers(tmp_path: Path, header: object, data: bytes, length: int | None) -> None:
    with pytest.raises(DamagedMemberError, match="x is damaged"):
        shard(tmp_path, header, data, length)


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    """Flip and cut bytes of a real shard's header: it is read or refused, never anything else."""
    writer = write(tmp_path, {"a": np.zeros((4, 16), np.float32), "b": np.zeros(128, np.int8)})
    good = (tmp_path / writer.members[0]).read_bytes()
    random.seed(1)
    refused = 0
    for _ in range(500):
        bad = bytearray(good)
        for _ in range(random.randint(1, 4)):
            bad[random.randrange(220)] = random.randrange(256)
        if random.random() < 0.3:
            del bad[random.randrange(len(bad)):]
        (tmp_path / "x").write_bytes(bad)
        try:
            reader = ParamsReader(FolderStore(tmp_path), ["x"])
            for name in reader.names:
                assert reader[name].nbytes <= len(bad)
        except DamagedMemberError:
            refused += 1
    assert refused > 250
    assert len(good) > HEADER_BYTES and safetensors.__version__
