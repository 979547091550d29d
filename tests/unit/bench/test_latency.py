"""What `relaxpack bench latency` measures: prompts that nothing has computed before."""

from __future__ import annotations

import pytest

from relaxpack.bench import latency
from relaxpack.bench.latency import LatencyCase, latency_report
from relaxpack.llm import LLM
from relaxpack.runtime.engine import Engine
from tests.helpers.fakes import FakeRunner
from tests.helpers.text import chatml


def test_no_prompt_is_cached_by_the_cases_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM.from_engine(Engine(FakeRunner(vocab_size=50_000, num_pages=200)), chatml())
    monkeypatch.setattr(latency, "LLM", lambda *bundle, **options: llm)
    report = latency_report("a bundle", [LatencyCase(batch, 20, 4) for batch in (1, 2, 2, 4)])
    assert [result["batch"] for result in report["results"]] == [1, 2, 2, 4]
    assert llm.engine.metrics.prompt_tokens > 20 * 3 * 9 and llm.engine.metrics.cached_tokens < 20      # by chance at most
