"""Requests with every sampling setting that edits logits, a grammar that needs no library, and what must hold between a
device sampler and the host's. Used over stand-ins and on a GPU.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relaxpack.kernel_spec import COUNT_BITS, FIRST_EDIT, IN_PROMPT, TOP_LOGPROBS
from relaxpack.runtime.cuda_executor import CudaExecutor
from relaxpack.runtime.cuda_model_runner import CudaModelRunner
from relaxpack.runtime.device_counts import MOST_EDITS
from relaxpack.runtime.engine import Engine
from relaxpack.runtime.executor import HostExecutor
from relaxpack.runtime.request import Sequence
from relaxpack.runtime.sampling_params import Grammar, SamplingParams

END = 7
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
PENALTIES = replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)


class Thirds:
    """A grammar: after token t comes one of those that are t + 1 modulo 3, but after multiples of 5 anything."""

    def __init__(self, vocab: int, last: int = 1) -> None:
        self.vocab, self.last = vocab, last

    def mask(self) -> np.ndarray | None:
        allowed = np.arange(self.vocab - 4) % 3 == (self.last + 1) % 3      # shorter than the vocabulary: the rest is not
        return None if self.last % 5 == 0 else allowed

    def bits(self) -> np.ndarray | None:
        mask = self.mask()
        return None if mask is None else np.packbits(mask, bitorder="little")

    def accept(self, token_id: int) -> bool:
        before, self.last = self.mask(), token_id
        return before is None or bool(token_id < len(before) and before[token_id])

    complete = False
    trouble = None

    def fork(self) -> Thirds:
        return Thirds(self.vocab, self.last)


def settings(vocab: int) -> dict[str, SamplingParams]:
    """Greedy ones. Those of `AHEAD` draw in the captured step and do not depend on the token before."""
    far = vocab - 1
    return {
        "penalties": PENALTIES,
        "bias": replace(GREEDY, logit_bias={3: 2.5, 11: -100.0, 40: 1.0, far: 20.0}),
        "min_tokens": replace(GREEDY, ignore_eos=False, min_tokens=9, logit_bias={END: 100.0}),
        "bad words": replace(GREEDY, repetition_penalty=0.8, bad_words=((4,), (20, 21), (33,))),
        "grammar": replace(GREEDY, grammar=Grammar("regex", "thirds")),
        "all": replace(PENALTIES, logit_bias={5: 4.0, END: 9.0}, min_tokens=12, bad_words=((5, 5), (9,)), ignore_eos=False,
                       grammar=Grammar("regex", "thirds")),
        "logprobs": replace(PENALTIES, logprobs=3),
        "many logprobs": replace(PENALTIES, logprobs=TOP_LOGPROBS + 4),
        "many": replace(GREEDY, logit_bias={i: float(i % 5) for i in range(61)}, bad_words=((1,),) * MOST_EDITS),
    }


AHEAD = ("penalties", "bias", "min_tokens", "logprobs")


def engine(runner: CudaModelRunner, on_device: bool = True) -> Engine:
    executor = CudaExecutor(runner) if on_device else HostExecutor(runner)
    return Engine(runner, executor=executor, end_token_ids=(END,),
                  make_constraint=lambda grammar: Thirds(runner.vocab_size))


def check_greedy(device: Engine, host: Engine, plain: Engine, prompts: list[list[int]], name: str) -> None:
    """A batch of the same settings, so that all of it runs ahead where it may; lengths differ, so that steps are dropped.
    The three engines may share a runner."""
    own = settings(device.runner.vocab_size)[name]
    params = [replace(own, max_tokens=24 + i) for i in range(len(prompts))]
    got, want = device.generate(prompts, params), host.generate(prompts, params)
    assert [c.choices[0].token_ids for c in got] == [c.choices[0].token_ids for c in want]
    assert [c.choices[0].finish_reason for c in got] == [c.choices[0].finish_reason for c in want]
    without = plain.generate(prompts, [replace(GREEDY, max_tokens=p.max_tokens) for p in params])
    assert any(a.choices[0].token_ids != b.choices[0].token_ids for a, b in zip(got, without, strict=True)), "no effect"
    assert device._ahead is not None
    assert (device._ahead.used > 0) is (name in AHEAD), "what can run ahead"
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        for place, (a, b) in enumerate(zip(one.choices[0].logprobs or [], other.choices[0].logprobs or [], strict=True)):
            where = (i, place, a, b)
            assert a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-4, where
            np.testing.assert_allclose([x for _, x in a.top], [x for _, x in b.top], atol=1e-4, err_msg=str(where))
            assert [t for t, _ in a.top] == [t for t, _ in b.top], where


def check_counts(made: Engine, sequence: Sequence) -> None:
    """The device's row of a running sequence is what its tokens say, but for a token that a step ahead has drawn."""
    executor, runner = made.executor, made.runner
    assert isinstance(executor, CudaExecutor) and isinstance(runner, CudaModelRunner)
    state, vocab = sequence.sampling, runner.vocab_size
    row = executor._counts._rows[state]
    words = runner._counts.numpy()[row.index].copy()
    if words[vocab + 1] == state.num_output:
        words[words[vocab]] -= 1
    elif state.num_output:
        assert words[vocab:vocab + FIRST_EDIT].tolist() == [state.token_ids[-1], state.num_output - 1]
    expected = np.zeros(vocab, np.int32)
    expected[state.token_ids[:state.num_prompt]] |= IN_PROMPT
    np.add.at(expected, state.token_ids[state.num_prompt:], 1)
    expected[row.edited] |= (FIRST_EDIT + np.arange(len(row.edited), dtype=np.int32)) << COUNT_BITS
    np.testing.assert_array_equal(words[:vocab], expected)
