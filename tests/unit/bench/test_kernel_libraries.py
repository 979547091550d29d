"""The building halves of the kernel benchmarks: what they need besides a compiler."""

from pathlib import Path

import pytest

from benchmarks.gpu.kernel_libraries import compile_parts
from relaxpack.schedules import cuda_compile


def test_a_missing_tool_is_said_before_anything_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compile, "find_cuobjdump", lambda: None)
    with pytest.raises(SystemExit, match="cuobjdump was not found: .* pip install nvidia-cuda-cuobjdump"):
        compile_parts(tmp_path / "made", "k", {"k": lambda: pytest.fail("compiled")})
    assert not (tmp_path / "made").exists()
