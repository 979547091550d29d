"""However a sequence is cut into steps, shares steps with others or lies in pages, its logits are the same.

Straight on the model runner, for several page sizes; the model mixes a sliding window with full attention, so that window
edges meet page edges. All pages are poisoned with NaN first: whatever is read without having been written shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from relaxpack.compile import BuildOptions, build_bundle
from relaxpack.relax_models.checkpoint import open_checkpoint
from relaxpack.runtime.load import load_model
from relaxpack.runtime.step_plan import ModelRunner, SequenceStep, StepPlan
from tests.helpers.numerics import Tape, decode_logits, prefill_logits, run, tapes
from tests.helpers.tiny_checkpoints import VOCAB_SIZE, write_checkpoint
from tests.reference.numpy_decoder import forward

CONTEXT = 208
PAGE_SIZES = (1, 8, 16, 64)
# float32 in another order of summation; logits have a standard deviation near 1.
TOLERANCE = 2e-4


@dataclass
class Paged:
    runner: ModelRunner
    prompts: list[list[int]]
    expected: list[np.ndarray]  # logits [len, vocab] of each prompt by the reference


@pytest.fixture(scope="module", params=PAGE_SIZES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Paged:
    path = tmp_path_factory.mktemp(f"page{request.param}")
    folder = write_checkpoint(path / "checkpoint", "qwen3", use_sliding_window=True, sliding_window=20,
                              layer_types=["sliding_attention", "full_attention"])
    build_bundle(folder, path / "bundle", options=BuildOptions(
        weights="f32", max_context=CONTEXT, max_batch=8, prefill_chunk=CONTEXT, page_size=request.param))
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (150, 1, 64, 33, 128, 7, 16, 65)]
    checkpoint = open_checkpoint(folder)
    expected = [forward(checkpoint, prompt, CONTEXT) for prompt in prompts]
    return Paged(load_model(path / "bundle").runner, prompts, expected)


@pytest.fixture
def paged(built: Paged) -> Iterator[Paged]:
    runner = built.runner
    every = list(range(runner.num_pages))
    runner.write_pages(every, np.full_like(runner.read_pages(every), np.nan))
    yield built


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_one_step_equals_the_reference(paged: Paged) -> None:
    for tape, expected in zip(tapes(paged.runner, paged.prompts), paged.expected, strict=True):
        assert_close(prefill_logits(tape, len(tape.token_ids)), expected)


@pytest.mark.parametrize("chunk", [2, 7, 63, 64, 65])
def test_chunks_equal_the_whole(paged: Paged, chunk: int) -> None:
    (tape,) = tapes(paged.runner, paged.prompts[:1])
    assert_close(prefill_logits(tape, 150, chunk), paged.expected[0])


def test_decodes_equal_the_whole(paged: Paged) -> None:
    (tape,) = tapes(paged.runner, paged.prompts[:1])
    assert_close(decode_logits(tape, 150), paged.expected[0])


def test_lengths_around_page_boundaries(paged: Paged) -> None:
    size = paged.runner.page_size
    for length in sorted({k * size + d for k in (1, 2, 3) for d in (-1, 0, 1)} & set(range(1, 148))):
        for first in (length, length // 2):   # in one step, and in two
            (tape,) = tapes(paged.runner, paged.prompts[:1], seed=length)
            parts = [prefill_logits(tape, first)] if first else []
            parts += [prefill_logits(tape, length)] if first < length else []
            parts.append(decode_logits(tape, length + 2))
            assert_close(np.concatenate(parts), paged.expected[0][:length + 2])


def test_packed_prefill_equals_alone(paged: Paged) -> None:
    chosen = [1, 2, 3, 5, 6, 7]  # 186 tokens: a length of 1, page-aligned ones, one beyond
    together = tapes(paged.runner, [paged.prompts[i] for i in chosen])
    logits = run(paged.runner, [tape.step(len(tape.token_ids)) for tape in together])
    assert_close(logits, np.concatenate([paged.expected[i] for i in chosen]))


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_batched_decode_equals_alone(paged: Paged, batch: int) -> None:
    def prefilled(together: list[Tape]) -> list[Tape]:
        for tape in together:
            if len(tape.token_ids) > 1:
                run(paged.runner, [tape.step(len(tape.token_ids) - 1, "none")])
        return together

    prompts = paged.prompts[:batch]
    together = prefilled(tapes(paged.runner, prompts))
    logits = run(paged.runner, [tape.step(1) for tape in together])
    assert_close(logits, np.stack([e[-1] for e in paged.expected[:batch]]))
    alone = np.concatenate([run(paged.runner, [tape.step(1)]) for tape in prefilled(tapes(paged.runner, prompts, 7))])
    if batch * 2 < 16:  # the very same kernels (attention cuts the context in parts below 16 tasks): bit for bit
        np.testing.assert_array_equal(logits, alone)
    assert_close(logits, alone)


def test_decodes_and_prefills_share_a_step(paged: Paged) -> None:
    together = tapes(paged.runner, paged.prompts[:5])
    decoding, fresh = together[0], together[1:4]
    run(paged.runner, [decoding.step(100, "none")])
    run(paged.runner, [together[4].step(50, "none")])
    steps = [decoding.step(1), *(tape.step(len(tape.token_ids)) for tape in fresh), together[4].step(30, "last")]
    logits = run(paged.runner, steps)
    e = paged.expected
    assert_close(logits, np.concatenate([e[0][100:101], e[1], e[2], e[3], e[4][79:80]]))
    assert_close(decode_logits(decoding, 110), e[0][101:110])   # and nobody's pages were touched by another


def test_order_of_sequences_does_not_matter(paged: Paged) -> None:
    chosen = [2, 5, 7]
    there = tapes(paged.runner, [paged.prompts[i] for i in chosen])
    forward_order = run(paged.runner, [tape.step(len(tape.token_ids), "last") for tape in there])
    back = tapes(paged.runner, [paged.prompts[i] for i in reversed(chosen)], seed=3)
    backward = run(paged.runner, [tape.step(len(tape.token_ids), "last") for tape in back])
    assert_close(forward_order, backward[::-1])


def test_a_fork_copies_its_last_page_and_shares_the_others(paged: Paged) -> None:
    runner, size = paged.runner, paged.runner.page_size
    (parent,) = tapes(runner, paged.prompts[:1])
    run(runner, [parent.step(70, "none")])
    full = 70 // size
    free = sorted(set(range(1, runner.num_pages)) - set(parent.page_ids))
    child = Tape(runner, [*parent.token_ids[:70], *paged.prompts[2][:30]],
                 [*parent.page_ids[:full], *free[:len(parent.page_ids) - full]])
    child.computed = 70
    copies = ((parent.page_ids[full], child.page_ids[full]),) if 70 % size else ()
    steps = (parent.step(10), child.step(30))
    logits = np.array(runner.forward(StepPlan(steps, copies)))
    (alone,) = tapes(runner, [child.token_ids], seed=11)
    run(runner, [alone.step(70, "none")])
    assert_close(logits, np.concatenate([paged.expected[0][70:80], run(runner, [alone.step(30)])]))


def test_a_step_may_want_no_logits(paged: Paged) -> None:
    (tape,) = tapes(paged.runner, paged.prompts[:1])
    assert run(paged.runner, [tape.step(40, "none")]).shape == (0, VOCAB_SIZE)
    assert run(paged.runner, [SequenceStep(paged.prompts[0][40:41], 40, tape.page_ids, [])]).shape == (0, VOCAB_SIZE)
    tape.computed = 41
    assert_close(decode_logits(tape, 44), paged.expected[0][41:44])


def test_pages_move_with_their_content(paged: Paged) -> None:
    """What `read_pages` gives and `write_pages` takes is the whole state of a sequence."""
    runner = paged.runner
    (tape,) = tapes(runner, paged.prompts[:1])
    run(runner, [tape.step(100, "none")])
    content = runner.read_pages(tape.page_ids)
    free = sorted(set(range(1, runner.num_pages)) - set(tape.page_ids))[:len(tape.page_ids)]
    runner.write_pages(free, content)
    runner.write_pages(tape.page_ids, np.full_like(content, np.nan))
    moved = Tape(runner, tape.token_ids, free)
    moved.computed = 100
    assert_close(decode_logits(moved, 110), paged.expected[0][100:110])
