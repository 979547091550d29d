"""The prefix cache survives a restart, and a store that does not fit is not used."""

import json
import stat

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from relaxpack.runtime.engine import Engine
from relaxpack.runtime.prefix_store import FILE_NAME, load_prefixes, save_prefixes
from relaxpack.runtime.sampling_params import SamplingParams
from tests.helpers.fakes import FakeRunner

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPTS = [list(range(1, 19)), [5, 6, 7], list(range(1, 10)) + [50] * 9]


@pytest.fixture
def saved(tmp_path):
    engine = Engine(FakeRunner())
    engine.generate(PROMPTS, GREEDY)
    report = save_prefixes(engine, tmp_path, "model-a")
    assert report.pages == engine.scheduler.pool.num_cached > 5 and not report.reason
    return tmp_path


def test_a_restarted_engine_hits_and_answers_right(saved):
    runner = FakeRunner()
    engine = Engine(runner)
    report = load_prefixes(engine, saved, "model-a")
    assert report.pages == engine.scheduler.pool.num_cached and not report.reason
    engine.scheduler.check()
    for prompt in PROMPTS:
        [output] = engine.generate([prompt], GREEDY)
        assert output.cached_tokens == len(prompt) - 2
        assert output.choices[0].token_ids == runner.reference_greedy(prompt, 6)
    engine.scheduler.check()


def test_only_the_owner_can_read_it_and_nothing_is_left_beside(saved):
    assert [p.name for p in saved.iterdir()] == [FILE_NAME]
    assert stat.S_IMODE((saved / FILE_NAME).stat().st_mode) == 0o600


def test_salts_stay_apart_on_disk(tmp_path):
    engine = Engine(FakeRunner())
    engine.generate(PROMPTS[:1], GREEDY, salt="tenant")
    save_prefixes(engine, tmp_path, "m")
    fresh = Engine(FakeRunner())
    load_prefixes(fresh, tmp_path, "m")
    assert fresh.generate(PROMPTS[:1], GREEDY)[0].cached_tokens == 0
    assert fresh.generate(PROMPTS[:1], GREEDY, salt="tenant")[0].cached_tokens == 16


def test_a_smaller_pool_takes_the_most_recent(saved):
    engine = Engine(FakeRunner(num_pages=5))
    report = load_prefixes(engine, saved, "model-a")
    assert report.pages == 4 and "did not fit" in report.reason
    engine.scheduler.check()


def test_max_pages_keeps_the_most_recent(tmp_path):
    engine = Engine(FakeRunner())
    engine.generate(PROMPTS, GREEDY)
    recent = engine.scheduler.pool.cached_pages()[-3:]
    names = {p.digest.hex() for p in engine.scheduler.cache.pages() if p.page_id in recent}
    assert save_prefixes(engine, tmp_path, "m", max_pages=3).pages == 3
    fresh = Engine(FakeRunner())
    load_prefixes(fresh, tmp_path, "m")
    assert {p.digest.hex() for p in fresh.scheduler.cache.pages()} == names


@pytest.mark.parametrize(("runner", "key", "word"), [
    (FakeRunner(), "model-b", "model"),
    (FakeRunner(page_size=8), "model-a", "page_size"),
])
def test_another_model_or_layout_is_not_used(saved, runner, key, word):
    report = load_prefixes(Engine(runner), saved, key)
    assert report.pages == 0 and f"another {word}" in report.reason


def test_a_store_without_digests_of_its_bytes_is_not_used(saved):
    path = saved / FILE_NAME
    metadata, tensors = _metadata(path), load_file(path)
    save_file(tensors, path, {**metadata, "format": "1"})
    report = load_prefixes(Engine(FakeRunner()), saved, "model-a")
    assert report.pages == 0 and "another format: 1, not 2" in report.reason


def _metadata(path):
    raw = path.read_bytes()
    return json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])["__metadata__"]


def _flip_digest(path):
    metadata, tensors = _metadata(path), load_file(path)
    metadata["entries"] = metadata["entries"].replace('"token_ids": [', '"token_ids": [96, ', 1)
    save_file(tensors, path, metadata)


def _enlarge_token(path):
    metadata, tensors = _metadata(path), load_file(path)
    metadata["entries"] = metadata["entries"].replace('"token_ids": [', f'"token_ids": [{10 ** 30}, ', 1)
    save_file(tensors, path, metadata)


def _nest_entries(path):
    save_file(load_file(path), path, {**_metadata(path), "entries": "[" * 100_000})


def _shorten_pages(path):
    metadata, tensors = _metadata(path), load_file(path)
    save_file({"pages": np.ascontiguousarray(tensors["pages"][:-1])}, path, metadata)


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:-100]),
    lambda path: path.write_bytes(b"\xff" * 100),
    _flip_digest,
    _enlarge_token,
    _nest_entries,
    _shorten_pages,
], ids=["empty", "cut", "noise", "wrong digest", "huge token", "nested entries", "fewer pages"])
def test_a_damaged_store_is_reported_and_nothing_is_loaded(saved, damage):
    damage(saved / FILE_NAME)
    engine = Engine(FakeRunner())
    report = load_prefixes(engine, saved, "model-a")
    assert report.pages == 0 and "damaged" in report.reason
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.total


def _answers_right(engine, runner):
    engine.scheduler.check()
    for prompt in PROMPTS:
        [output] = engine.generate([prompt], GREEDY)
        assert output.choices[0].token_ids == runner.reference_greedy(prompt, 6)


def test_a_page_with_a_flipped_byte_is_left_out_and_said(saved):
    path = saved / FILE_NAME
    metadata, pages = _metadata(path), load_file(path)["pages"]
    pages[2, 5] ^= 1
    save_file({"pages": pages}, path, metadata)
    runner = FakeRunner()
    engine = Engine(runner)
    report = load_prefixes(engine, saved, "model-a")
    assert report.pages == len(pages) - 1 == engine.scheduler.pool.num_cached
    assert f"{path} is damaged: 1 of its {len(pages)} pages" in report.reason
    left_out = json.loads(metadata["entries"])[2]["digest"]
    assert left_out not in {p.digest.hex() for p in engine.scheduler.cache.pages()}
    _answers_right(engine, runner)


def test_no_flipped_byte_gives_a_wrong_answer(saved):
    """Wherever it is: in the header, the names, the digests or the pages."""
    path = saved / FILE_NAME
    sound = path.read_bytes()
    reported = 0
    for place in range(0, len(sound), 41):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 4]) + sound[place + 1:])
        runner = FakeRunner()
        engine = Engine(runner)
        reported += bool(load_prefixes(engine, saved, "model-a").reason)
        _answers_right(engine, runner)
    assert reported > 50


def test_damage_does_not_take_the_place_of_sound_pages(saved):
    path = saved / FILE_NAME
    metadata, pages = _metadata(path), load_file(path)["pages"]
    pages[-1, 0] ^= 1
    save_file({"pages": pages}, path, metadata)
    engine = Engine(FakeRunner(num_pages=5))
    report = load_prefixes(engine, saved, "model-a")
    assert report.pages == 4 and "1 of its" in report.reason and f"{len(pages) - 5} more did not fit" in report.reason


def test_nothing_to_save_or_load(tmp_path):
    engine = Engine(FakeRunner())
    assert save_prefixes(engine, tmp_path, "m").reason == "nothing is cached"
    assert "does not exist yet" in load_prefixes(engine, tmp_path, "m").reason
    assert "off" in load_prefixes(Engine(FakeRunner(), prefix_caching=False), tmp_path, "m").reason
