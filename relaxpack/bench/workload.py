"""What a load test asks: prompts and output lengths from a seed, and when each request is sent.

Lengths follow a log-normal fit of the public ShareGPT conversations (prompt: median 65 tokens, mean near 200; output: median
130, mean near 200), which are long-tailed. Equal settings give equal requests on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from relaxpack.errors import UsageError

# Short common words: about one token each in every usual vocabulary. Servers report the true counts.
WORDS = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but "
    "what all were when we there can an your which their said if do will each about how up out them then she "
    "many some so these would other into has more her two like him see time could no make than first been its "
    "who now people my made over did down only way find use may water long little very after words called just "
    "where most know get through back much before go good new write our used me man too any day same right "
    "look think also around another came come work three word must because does part even place well such here "
    "take why things help put years different away again off went old number great tell men say small every "
    "found still between name should home big give air line set own under read last never us left end along "
    "while might next sound below saw something thought both few those always looked show large often together "
    "asked house world going want school important until form food keep children feet land side without boy "
    "once animals life enough took sometimes four head above kind began almost live page got earth need far "
    "hand high year mother light parts country father let night following picture being study second eyes soon "
    "times story boys since white days ever paper hard near sentence better best across during today others "
    "however sure means knew ").split()
_PROMPT, _OUTPUT = (math.log(65), 1.5), (math.log(130), 0.95)      # of ln(length): median and deviation


@dataclass(frozen=True)
class Workload:
    requests: int
    seed: int = 0
    rate: float | None = None               # arrivals per second, Poisson; None: closed loop
    concurrency: int | None = None          # requests at once in a closed loop
    prompt_tokens: int | None = None        # fixed lengths instead of the ShareGPT-like ones
    output_tokens: int | None = None
    max_tokens: int = 2048                  # prompt and output together; longer ones are cut
    shared_prefix: int = 0                  # tokens at the start that requests of a group share
    prefix_groups: int = 1
    share: float = 1.0                      # of requests that have a shared prefix

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise UsageError("give either a rate of arrivals (open loop) or a number at once (closed loop)")
        longest = (self.prompt_tokens or 1) + self.shared_prefix + (self.output_tokens or 1)
        if longest > self.max_tokens:
            raise UsageError(f"prompt, shared prefix and output need {longest} tokens together, but the context holds "
                             f"{self.max_tokens}: ask for fewer")


@dataclass(frozen=True)
class LoadRequest:
    number: int
    arrival: float          # seconds after the start; 0 in a closed loop
    prompt: str | Sequence[int]     # text or token ids
    output_tokens: int


def requests_of(workload: Workload) -> Iterator[LoadRequest]:
    """The requests of a workload in order of arrival, the same for the same seed."""
    rng = random.Random(workload.seed)
    prefixes = [_words(rng, workload.shared_prefix) for _ in range(workload.prefix_groups)]
    arrival = 0.0
    for number in range(workload.requests):
        if workload.rate is not None and number:
            arrival += rng.expovariate(workload.rate)
        prefix = rng.choice(prefixes) if rng.random() < workload.share else ""
        prompt_tokens = workload.prompt_tokens or _length(rng, *_PROMPT)
        output_tokens = workload.output_tokens or _length(rng, *_OUTPUT)
        # A word may be two tokens, so a prompt is kept well below the limit.
        room = workload.max_tokens - workload.shared_prefix
        output_tokens = max(1, min(output_tokens, room // 2 if workload.output_tokens is None else room - 1))
        if workload.prompt_tokens is None:
            prompt_tokens = max(1, min(prompt_tokens, int((room - output_tokens) * 0.7)))
        # The number at the start of the own part keeps requests from hitting each other's cached prefixes by chance.
        yield LoadRequest(number, arrival, f"{prefix}{number} {_words(rng, max(prompt_tokens - 2, 1))}", output_tokens)


def _words(rng: random.Random, count: int) -> str:
    return "".join(f"{word} " for word in rng.choices(WORDS, k=count))


def _length(rng: random.Random, mean: float, deviation: float) -> int:
    return max(4, round(rng.lognormvariate(mean, deviation)))
