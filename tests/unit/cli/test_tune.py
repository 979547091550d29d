"""`relaxpack tune` ends with the build that uses what it found."""

from __future__ import annotations

from relaxpack.cli.tune import _build_command, tune


def test_the_build_repeats_what_it_must_share() -> None:
    with tune.make_context("tune", ["a model", "--weights", "q8", "-O", "2", "--target", "cuda", "--only", "norm"]):
        assert _build_command("a model", "team.sqlite") == \
            "relaxpack build 'a model' -o NEW_BUNDLE --target cuda --weights q8 -O 2 --db team.sqlite"
    with tune.make_context("tune", ["smollm2", "--trials", "9"]):
        assert _build_command("smollm2", "x.sqlite") == "relaxpack build smollm2 -o NEW_BUNDLE --db x.sqlite"
