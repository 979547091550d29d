"""Sampling on the device against the host sampler, over the stand-ins of `captured_model`: penalties, biases, bans and
grammars give the same greedy tokens under preemption, forks, cancelled requests and dropped run-ahead steps, and a seed
gives the same text whatever else is in the step.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from relaxpack.dist.bundle import Bundle
from relaxpack.errors import BundleError
from relaxpack.passes.memory_plan import PLAN
from relaxpack.relax_models.export import BuildLimits
from relaxpack.runtime import cuda_memory
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.device_counts import DeviceCounts
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.load import load_runner
from relaxpack.runtime.request import Request
from relaxpack.runtime.sampler import NOTHING_ALLOWED, SamplingState
from relaxpack.runtime.sampling_params import Grammar, SamplingParams
from relaxpack.runtime.structured import GrammarCompiler
from tests.helpers import sampling_requests
from tests.helpers.captured_model import CapturedModel, as_gpu, build, host_memory, runner, write_bundle
from tests.helpers.sampling_requests import GREEDY, PENALTIES, check_counts, check_greedy

LIMITS = BuildLimits(64, max_batch=6, prefill_chunk=48, page_size=4)
VOCAB = 61


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CapturedModel:
    return build(tmp_path_factory.mktemp("sampling"), LIMITS, {"decode": (1, 2, 4), "prefill": (4, 8)})


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_memory(monkeypatch)


def engine(model: CapturedModel, on_device: bool = True, **options: object) -> Engine:
    return sampling_requests.engine(runner(model, **options)[0], on_device)  # type: ignore[arg-type]


SETTINGS = sampling_requests.settings(VOCAB)


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(8, 60, 3 + i % 4).tolist() for i in range(count)]


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_tokens_equal_those_of_the_host(model: CapturedModel, name: str) -> None:
    check_greedy(engine(model), engine(model, on_device=False), engine(model), prompts(4), name)


@pytest.mark.parametrize("name", ["plain", "grammar"])
def test_inputs_too_long_for_the_queue_go_through_pinned_memory(model: CapturedModel, monkeypatch: pytest.MonkeyPatch,
                                                                name: str) -> None:
    expected = [o.choices[0].token_ids for o in engine(model).generate(prompts(4), SETTINGS.get(name, GREEDY))]
    monkeypatch.setattr(cuda_memory, "QUEUED_BYTES", 4)
    assert [o.choices[0].token_ids for o in engine(model).generate(prompts(4), SETTINGS.get(name, GREEDY))] == expected


def storm(made: Engine, seed: int) -> tuple[list[Request], set[int]]:
    """Requests with every setting arrive, fork, end and are cancelled while pages are scarce."""
    rng = random.Random(seed)
    arrivals = []
    for _ in range(18):
        params = rng.choice(list(SETTINGS.values()))
        params = replace(params, max_tokens=params.min_tokens + rng.randrange(2, 30), n=rng.choice([1, 1, 1, 3]))
        arrivals.append((rng.randrange(60), [rng.randrange(8, 60) for _ in range(rng.randrange(1, 20))], params))
    cancels = {i: rng.randrange(20, 80) for i in rng.sample(range(18), 3)}
    requests: dict[int, Request] = {}
    for step in range(3000):
        for i, (at, prompt, params) in enumerate(arrivals):
            if at == step:
                requests[i] = made.add(prompt, params)
        for i, at in cancels.items():
            if at == step and i in requests:
                made.cancel(requests[i])
        made.step()
        if not made.has_work and step > 80:
            break
    assert not made.has_work
    return [requests[i] for i in range(18)], set(cancels)


def test_a_storm_of_requests_gets_what_the_host_gives_each_alone(model: CapturedModel) -> None:
    alone = engine(model, on_device=False)
    preemptions = used = dropped = 0
    for seed in range(6):
        device = engine(model, num_pages=26)
        requests, cancelled = storm(device, seed)
        for i, request in enumerate(requests):
            want = alone.generate([request.prompt_ids], request.params)[0].choices
            for sequence, choice in zip(request.sequences, want, strict=True):
                assert sequence.error is None and choice.error is None
                known = len(sequence.output_ids) if i in cancelled else None
                assert sequence.output_ids == choice.token_ids[:known], (seed, i, request.params)
        assert device._ahead is not None
        preemptions += device.scheduler.preemptions
        used, dropped = used + device._ahead.used, dropped + device._ahead.dropped
    assert preemptions > 5 and used > 5 and dropped > 2, (preemptions, used, dropped)


def test_counts_on_the_device_are_those_of_the_tokens(model: CapturedModel) -> None:
    """At every step, though some are dropped: another request arrives while a step runs ahead."""
    made = engine(model)
    first = made.add(prompts(1)[0], replace(PENALTIES, logit_bias={2: 0.5}))
    made.step()
    for step in range(20):
        if step in (4, 10):
            made.add(prompts(2)[1], replace(PENALTIES, max_tokens=3))
        made.step()
        check_counts(made, first.sequences[0])
    assert made._ahead is not None and made._ahead.dropped >= 2


def test_a_seed_gives_the_same_text_alone_and_beside_anything(model: CapturedModel) -> None:
    """Also beside requests that leave the captured step: a grammar, likeliest tokens, prompt scores, several outputs."""
    own = SamplingParams(temperature=1.5, seed=11, max_tokens=25, ignore_eos=True, frequency_penalty=0.3)
    beside = [SETTINGS["grammar"], SETTINGS["logprobs"], replace(GREEDY, prompt_logprobs=2), SETTINGS["many"],
              replace(own, seed=5, n=3)]
    alone = engine(model).generate([prompts(1)[0]], own)[0].choices[0].token_ids
    assert len(set(alone)) > 5
    for other in beside:
        crowd = engine(model)
        both = crowd.generate([prompts(1)[0], prompts(2)[1]], [own, replace(other, max_tokens=17)])
        assert both[0].choices[0].token_ids == alone, other
    crowd = engine(model)
    everyone = crowd.generate(prompts(len(beside) + 1), [own, *beside])
    assert everyone[0].choices[0].token_ids == alone
    forked = everyone[-1].choices
    assert len({tuple(c.token_ids) for c in forked}) == 3, "outputs of one prompt differ"
    again = engine(model).generate([prompts(6)[5]], beside[-1])[0].choices
    assert [c.token_ids for c in again] == [c.token_ids for c in forked]


def test_a_grammar_of_llguidance(model: CapturedModel) -> None:
    """Its masks go to the device as the bits that the library wrote."""
    pytest.importorskip("llguidance")
    letters = string.ascii_letters + string.digits[:VOCAB - 1 - 52]
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)} | {"<end>": VOCAB - 1}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["<end>"])
    compiler = GrammarCompiler(words.to_str(), VOCAB, [VOCAB - 1])
    made, _ = runner(model)
    drawn = Engine(made, executor=CudaExecutor(made), end_token_ids=(VOCAB - 1,), make_constraint=compiler)
    params = [SamplingParams(temperature=2.0, seed=i, max_tokens=12, grammar=Grammar("regex", "(ab|Ba)c{2,5}[0-9]?"))
              for i in range(3)]
    answers = [output.choices[0].token_ids for output in drawn.generate(prompts(3), params)]
    texts = ["".join(letters[t] for t in answer if t < VOCAB - 1) for answer in answers]
    assert all(re.fullmatch("(ab|Ba)c{2,5}[0-9]?", text) for text in texts) and len(set(texts)) > 1, texts


def test_asking_for_logprobs_changes_no_token(model: CapturedModel) -> None:
    own = SamplingParams(temperature=1.2, seed=3, max_tokens=20, ignore_eos=True)
    texts = {k: engine(model).generate(prompts(1), replace(own, logprobs=k))[0].choices[0] for k in (None, 0, 4)}
    assert texts[None].token_ids == texts[0].token_ids == texts[4].token_ids
    for a, b in zip(texts[0].logprobs or [], texts[4].logprobs or [], strict=True):
        assert abs(a.logprob - b.logprob) < 1e-5 and not a.top and len(b.top) == 4
        assert b.top[0][1] >= b.logprob - 1e-6


def test_where_nothing_is_allowed_the_request_ends_with_that_error(model: CapturedModel) -> None:
    """And the one beside it goes on."""
    nothing = replace(SETTINGS["grammar"], bad_words=tuple((i,) for i in range(VOCAB)))
    banned = replace(GREEDY, bad_words=nothing.bad_words)
    for bad in (nothing, banned):
        got = engine(model).generate(prompts(2), [bad, GREEDY])
        assert got[0].choices[0].error == NOTHING_ALLOWED and got[0].choices[0].token_ids == []
        assert len(got[1].choices[0].token_ids) == 30


class Memory:
    """Rows of counts that only remember what was written."""

    max_batch, vocab_size = 2, 50

    def __init__(self) -> None:
        self.writes: list[tuple[int, int, int]] = []

    def write_counts(self, row: int, first: int, count: int, fill: Callable[[np.ndarray], None]) -> None:
        fill(np.empty(count, np.int32))
        self.writes.append((row, first, count))


def test_rows_of_counts_are_filled_once_and_taken_from_who_was_idle_longest() -> None:
    memory = Memory()
    counts = DeviceCounts(memory)
    a, b, c = (SamplingState(PENALTIES, i, [1, 2, 3], 3) for i in range(3))
    plain = SamplingState(GREEDY, 9, [1], 1)
    assert counts.rows([plain]) == [-1] and memory.writes == []
    first = counts.rows([a, plain, b])
    assert sorted(first) == [-1, 0, 1] and first[1] == -1 and len(memory.writes) == 2
    a.token_ids.append(4)
    assert counts.rows([a]) == first[:1] and counts.rows([a], ahead=1) == first[:1] and len(memory.writes) == 2
    assert counts.rows([c]) == first[2:] and len(memory.writes) == 3, "b was idle longest"
    assert counts.rows([b, c]) == [first[0], first[2]], "c is in the step, so a gives way"
    c.token_ids += [1, 2, 3]
    counts.rows([c])
    assert len(memory.writes) == 5, "drawn elsewhere in between: filled again"


def test_a_ban_that_ends_is_written_once(model: CapturedModel) -> None:
    memory = Memory()
    counts = DeviceCounts(memory)
    state = SamplingState(replace(GREEDY, min_tokens=3), 0, [1, 2], 2, end_ids=[7])
    for _ in range(6):
        counts.rows([state])
        counts.rows([state], ahead=1)
        state.token_ids.append(5)
    assert [write[1:] for write in memory.writes] == [(0, 50 + 512), (50 + 2, 1)]


def test_a_bundle_of_an_older_sampler_is_refused(model: CapturedModel, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    as_gpu(monkeypatch)
    write_bundle(model, tmp_path / "old.bundle", ("prefill", "decode", "sample"))
    with pytest.raises(BundleError, match=r"old\.bundle: cuda:sm_90a was built by relaxpack test, whose.*build it again"):
        load_runner(Bundle.open(tmp_path / "old.bundle"), "cuda")


def test_what_reads_results_shares_no_memory_with_them(model: CapturedModel) -> None:
    """Logits of a captured step lie in the arena that functions share: `sample` writes its intermediates elsewhere."""
    shared = {gv.name_hint for gv, func in model.final.functions_items() if "get_cached_alloc" in str(func)}
    assert {"decode", "decode_4", "prefill", "prefill_8"} <= shared and not {"sample", "top_logprobs"} & shared
    plan = json.loads(str(model.final.attrs[PLAN]))
    assert plan["sample"]["storages"] == plan["top_logprobs"]["storages"] == []
