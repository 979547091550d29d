"""The sampler against plain float64 distributions: exact kept sets, and frequencies by a chi-square test."""

import numpy as np
import pytest

from relaxpack.runtime.sampler import SamplingState, sample, score, sequence_key, uniforms
from relaxpack.runtime.sampling_params import SamplingParams
from relaxpack.runtime.step_plan import PromptScore
from relaxpack.runtime.token_filters import FilterBatch, draw_filtered, top_candidates


def reference_distribution(logits, params, prompt=(), output=()):
    """float64 [V]: what the documented order of filters leaves, written one token at a time."""
    x = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    x = x / params.temperature
    p = np.exp(x - x.max())
    if params.top_k:
        p[x < np.sort(x)[-min(params.top_k, len(x))]] = 0
    p /= p.sum()
    if params.top_p < 1:
        keep, mass = np.zeros(len(p), bool), 0.0
        for token in np.argsort(-p, kind="stable"):
            if mass >= params.top_p:
                break
            keep[token] = True
            mass += p[token]
        p = np.where(keep, p, 0) / p[keep].sum()
    p = np.where(p >= params.min_p * p.max(), p, 0)
    p /= p.sum()
    if params.typical_p < 1:
        safe = np.where(p > 0, p, 1)
        distance = np.where(p > 0, np.abs(-np.log(safe) + (p * np.log(safe)).sum()), np.inf)
        keep, mass = np.zeros(len(p), bool), 0.0
        for token in np.argsort(distance, kind="stable"):
            if mass >= params.typical_p:
                break
            keep[token] = True
            mass += p[token]
        p = np.where(keep, p, 0)
    return p / p.sum()


def state_of(params, output=(), prompt=(0,), index=0, **more):
    token_ids = [*prompt, *output]
    return SamplingState(params, sequence_key(params.seed, index), token_ids, len(prompt), **more)


def logits_of(vocab, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(vocab) * scale).astype(np.float32)


SETTINGS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 7},
    "top_k wide": {"top_k": 180},
    "top_p": {"top_p": 0.8},
    "top_p wide": {"top_p": 0.999, "temperature": 5.0},
    "min_p": {"min_p": 0.1},
    "typical": {"typical_p": 0.6},
    "k and p": {"top_k": 20, "top_p": 0.7},
    "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {3: 5.0, 50: -100.0}, "top_p": 0.9},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_match_the_reference(name):
    """20000 draws; chi-square over the tokens expected at least 5 times, 5 standard deviations allowed."""
    params = SamplingParams(seed=1, **SETTINGS[name])
    vocab, draws = 211, 20_000
    logits = logits_of(vocab)
    prompt, output = (5, 9, 9), (9, 17, 17, 30)
    p = reference_distribution(logits, params, prompt, output)
    states = [state_of(params, output, prompt, index=i) for i in range(draws)]
    token_ids = np.concatenate([
        sample(np.broadcast_to(logits, (2000, vocab)), range(2000), states[i:i + 2000]).token_ids
        for i in range(0, draws, 2000)])
    counts = np.bincount(token_ids, minlength=vocab)
    assert counts[p == 0].sum() == 0, "a token that must be filtered out was drawn"
    seen = p * draws >= 5
    chi2 = ((counts[seen] - p[seen] * draws) ** 2 / (p[seen] * draws)).sum()
    freedom = max(1, seen.sum() - 1)
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom), (chi2, freedom)


@pytest.mark.parametrize("vocab", [50, 1000, 49_152])
@pytest.mark.parametrize("settings", [
    {"top_k": 1}, {"top_k": 5}, {"top_k": 300}, {"top_k": 10**6}, {"top_p": 0.5}, {"top_p": 0.9999},
    {"top_p": 1e-9}, {"min_p": 0.3}, {"min_p": 1.0}, {"typical_p": 0.3}, {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
])
def test_every_quantile_lands_where_the_reference_says(vocab, settings):
    """The draw is the inverse of the running sum in the order of ids, so each quantile has one right token."""
    params = SamplingParams(temperature=1.7, **settings)
    logits = logits_of(vocab, seed=3)
    running = np.cumsum(reference_distribution(logits, params))
    u = (np.arange(40) + 0.5) / 40
    expected = np.searchsorted(running, u, side="right")
    scaled = np.repeat(((logits - logits.max()) / np.float32(1.7))[None], len(u), axis=0)
    batch = FilterBatch(*(np.full(len(u), getattr(params, f)) for f in ("top_k", "top_p", "min_p", "typical_p")))
    found = draw_filtered(scaled, batch, u)
    distance = np.minimum(np.abs(running[expected] - u), np.abs(running[np.maximum(expected - 1, 0)] - u))
    clear = distance > 1e-6     # nearer than that, float32 logits may round either way
    assert clear.sum() >= 30
    assert (found[clear] == expected[clear]).all()


def test_rows_do_not_influence_each_other():
    """Any mix of settings gives each row what it gets alone."""
    rng = np.random.default_rng(5)
    choices = [*SETTINGS.values(), {"temperature": 0.0}, {"logprobs": 4}, {"min_tokens": 3}]
    params = [SamplingParams(seed=i, **choices[rng.integers(len(choices))]) for i in range(64)]
    logits = (rng.standard_normal((64, 5000)) * rng.uniform(0.1, 6, (64, 1))).astype(np.float32)
    before = logits.copy()
    states = [state_of(p, output=(3, 4), end_ids=[9]) for p in params]
    together = sample(logits, range(64), states)
    assert (logits == before).all()
    for i in range(64):
        alone = sample(logits, [i], [states[i]])
        assert alone.token_ids == [together.token_ids[i]]
        assert together.logprobs[i] == (alone.logprobs[0] if alone.logprobs else None)


def test_a_nucleus_wider_than_the_first_guess():
    """Nearly flat logits: the nucleus holds tens of thousands of tokens and needs all of them."""
    logits = logits_of(49_152, scale=0.01)
    p = reference_distribution(logits, SamplingParams(top_p=0.9))
    states = [state_of(SamplingParams(top_p=0.9, seed=i)) for i in range(64)]
    token_ids = sample(np.broadcast_to(logits, (64, 49_152)), range(64), states).token_ids
    assert (p[token_ids] > 0).all() and len(set(token_ids)) == 64


def test_equal_logits_at_the_border_of_top_k_all_stay():
    logits = np.zeros((400, 8), np.float32)
    logits[:, 0] = 1.0
    states = [state_of(SamplingParams(top_k=2, seed=i)) for i in range(400)]
    assert set(sample(logits, range(400), states).token_ids) == set(range(8))


def test_greedy_takes_the_lowest_of_equal_maxima():
    logits = np.zeros((1, 8), np.float32)
    assert sample(logits, [0], [state_of(SamplingParams(temperature=0.0))]).token_ids == [0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 100.0])
def test_extreme_temperatures_and_logits_stay_finite(temperature):
    logits = np.array([[3e38, -3e38, 0.0, 2e38]], np.float32)
    result = sample(logits, [0], [state_of(SamplingParams(temperature=temperature, seed=1))])
    assert result.token_ids == [0] and not result.errors


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"logprobs": 2}])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_fail_their_row_only(settings, bad):
    logits = np.zeros((2, 50), np.float32)
    logits[1, 7] = 9.0
    logits[0, 31] = bad
    states = [state_of(SamplingParams(seed=1, **settings)), state_of(SamplingParams(temperature=0.0))]
    result = sample(logits, [0, 1], states)
    assert result.token_ids == [-1, 7] and list(result.errors) == [0]


def test_all_minus_infinity_is_an_error_not_token_0():
    states = [state_of(SamplingParams(seed=1))]
    result = sample(np.full((1, 9), -np.inf, np.float32), [0], states)
    assert result.token_ids == [-1] and 0 in result.errors


def test_bad_words_and_min_tokens_ban_tokens():
    logits = logits_of(30)[None]
    first, second = (int(t) for t in np.argsort(-logits[0])[:2])

    def pick(output=(), **settings):
        state = state_of(SamplingParams(temperature=0.0, **settings), output, end_ids=[first])
        return sample(logits, [0], [state]).token_ids[0]

    assert pick() == first
    assert pick(bad_words=((first,),)) == second
    assert pick(bad_words=((4, 5, first),), output=(4, 5)) == second
    assert pick(bad_words=((4, 5, first),), output=(5, 5)) == first
    assert pick(bad_words=((4, first),), output=()) == first       # the prompt does not count
    assert pick(min_tokens=2, output=(1,)) == second
    assert pick(min_tokens=2, output=(1, 1)) == first


def test_a_mask_restricts_and_an_empty_mask_is_an_error():
    class Only:
        def __init__(self, *allowed, trouble=None):
            self.allowed, self.trouble = allowed, trouble

        def mask(self):
            mask = np.zeros(20, bool)       # shorter than the vocabulary: the rest is never allowed
            mask[list(self.allowed)] = True
            return mask

    logits = np.broadcast_to(np.arange(30, dtype=np.float32), (3, 30))
    greedy = SamplingParams(temperature=0.0)
    states = [state_of(greedy, constraint=Only(4, 6)), state_of(greedy, constraint=Only()), state_of(greedy)]
    result = sample(logits, range(3), states)
    assert result.token_ids == [6, -1, 29] and "no token is allowed" in result.errors[1]
    states[1] = state_of(greedy, constraint=Only(trouble="the grammar is too large"))
    assert sample(logits, range(3), states).errors[1] == "the grammar is too large"
    ahead = sample(logits, range(3), states, masks={0: Only(5).mask(), 1: Only(3).mask()})
    assert ahead.token_ids == [5, 3, 29]


def test_score_against_float64():
    logits = logits_of(49_152)[None].repeat(3, axis=0)
    logits[2] += 500        # shift: same distribution
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    for row, own in enumerate(score(logits, [0, 1, 2], [5, 6, 7], [0, 3, 20])):
        assert own.logprob == pytest.approx(exact[row, 5 + row], abs=2e-4 if row == 2 else 1e-5)
        order = np.argsort(-exact[row], kind="stable")[:(0, 3, 20)[row]]
        assert [t for t, _ in own.top] == order.tolist()
    scores = sample(logits, [], [], [PromptScore(1, 6, 2)]).prompt_logprobs
    assert scores == score(logits, [1], [6], [2])


@pytest.mark.parametrize("vocab", [64, 1000, 49_155])
@pytest.mark.parametrize("size", [1, 10, 63, 400, 10**6])
def test_candidates_hold_the_largest(vocab, size):
    x = np.stack([logits_of(vocab, seed=s) for s in range(4)])
    x[3] = np.round(x[3])       # many ties
    ids, values = top_candidates(x, size)
    for row in range(4):
        threshold = np.sort(x[row])[-min(size, vocab)]
        real = values[row] > -np.inf
        assert set(np.flatnonzero(x[row] >= threshold)) <= set(ids[row][real])
        assert (np.diff(ids[row][real]) > 0).all() and (values[row][real] == x[row][ids[row][real]]).all()


def test_uniforms_are_uniform_and_reproducible():
    keys = np.array([sequence_key(3, i) for i in range(200)], np.uint64)
    u = np.concatenate([uniforms(keys, np.full(200, c, np.uint64)) for c in range(200)])
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 99 + 5 * np.sqrt(198)
    assert len(np.unique(u)) == len(u)
    by_counter = u.reshape(200, 200)
    assert abs(np.corrcoef(by_counter[0], by_counter[1])[0, 1]) < 0.25      # 3.5 standard deviations
    assert sequence_key(3, 0) == sequence_key(3, 0) != sequence_key(4, 0)
    assert sequence_key(None, 0) != sequence_key(None, 0)
    assert sequence_key(-1, 0) == sequence_key(2**64 - 1, 0)
