"""Records count for the kernels that they have measured: a family whose kernels change must get another number."""

from __future__ import annotations

import pytest

from relaxpack.kernel_generations import GENERATIONS
from tests.helpers import kernel_texts
from tests.helpers.cuda_harness import can_generate

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not can_generate(), reason="no CUDA code generator")]


@pytest.mark.parametrize("family", kernel_texts.FAMILIES)
def test_a_family_that_has_changed_has_another_number(family: str) -> None:
    known = kernel_texts.agreed()[family]
    assert (kernel_texts.digest_of(family) == known["text"]) == (GENERATIONS[family] == known["generation"]), (
        f"the kernels of {family} have another text than when its records were made, or its number was raised for nothing: "
        "see relaxpack/kernel_generations.py and tests/helpers/kernel_texts.py")


def test_a_change_is_only_written_down_with_another_number(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    path = kernel_texts.Path(str(tmp_path)) / "texts.json"
    monkeypatch.setattr(kernel_texts, "PATH", path)
    monkeypatch.setattr(kernel_texts, "FAMILIES", ("cuda.norm",))
    monkeypatch.setattr(kernel_texts, "digest_of", lambda family: "one text")
    assert kernel_texts.main() == 0
    monkeypatch.setattr(kernel_texts, "digest_of", lambda family: "another text")
    assert kernel_texts.main() == 1 and kernel_texts.agreed()["cuda.norm"]["text"] == "one text"
    monkeypatch.setitem(GENERATIONS, "cuda.norm", GENERATIONS["cuda.norm"] + 1)
    assert kernel_texts.main() == 0
    assert kernel_texts.agreed()["cuda.norm"] == {"generation": GENERATIONS["cuda.norm"], "text": "another text"}
