"""The check of the attention benchmarks that a kernel gives the same bits each time, on the CPU, with kernels made up."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
device = pytest.importorskip("tests.helpers.attention_device")


@pytest.mark.parametrize(("wrong", "expected"), [((), 0), ((7,), 1), ((0, 50, 99), 3)])
def test_repeats_with_other_bits_are_counted(wrong: tuple[int, ...], expected: int) -> None:
    y, seen = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4), []

    def launch() -> None:
        assert y.isnan().all()                           # what it leaves out shows
        y.copy_(torch.arange(12, dtype=torch.bfloat16).reshape(3, 4))
        y[1, 2] *= 1 if len(seen) not in wrong else 1.01
        seen.append(1)

    assert device.other_bits(launch, y) == expected and len(seen) == device.REPEATS == 100


def test_an_output_that_is_not_written_differs() -> None:
    y = torch.zeros((2, 2), dtype=torch.float16)
    assert device.other_bits(lambda: None, y, 3) == 3
