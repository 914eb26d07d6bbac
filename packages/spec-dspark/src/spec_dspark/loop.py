"""Speculative decoding of one prompt from start to end, with any model and any drafter.

The output is the target's own: token for token if it is greedy or the drafter takes no chances, in
distribution if drafts are drawn. Step time and acceptance are separate figures; :class:`Generated`
gives the acceptance only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import jax
import numpy as np
from kda_mla_kernels.model import Model, State
from kda_mla_kernels.sampling import Sampling, SamplingParams, sample

from spec_dspark.drafter import Drafter
from spec_dspark.rounds import Live, Round, run_round

__all__ = ["Generated", "Request", "generate", "stream"]


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    Raises:
        ValueError: an empty prompt or ``max_tokens`` below 1.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt needs at least one token")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")


@dataclass(frozen=True)
class Generated:
    """A finished sequence."""

    tokens: tuple[int, ...]
    """What was generated, the stop token included if there was one."""
    finish: Literal["stop", "length"]
    rounds: int
    """Verify steps; the first token comes from the prefill."""
    drafted: int
    """Drafts that were judged."""
    accepted: int
    """Drafts that were accepted, before any were cut off at the end."""

    @property
    def tokens_per_round(self) -> float:
        """Mean acceptance length: accepted drafts and the token that follows them."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


def generate(
    model: Model, state: State, drafter: Drafter, request: Request, row: int = 0
) -> tuple[Generated, State]:
    """Generates until a stop token, ``max_tokens`` or the end of the context.

    Args:
        state: consumed; ``row`` is emptied first and left holding what was consumed.

    Returns:
        The result and the next state.

    Raises:
        ValueError: the prompt leaves no room in the context.
    """
    tokens: list[int] = []
    rounds = drafted = accepted = 0
    for step in stream(model, state, drafter, request, row):
        state = step.state
        tokens += step.emitted[0]
        if step.drafted:  # the first step is the prefill's
            rounds += 1
            drafted += step.drafted[0]
            accepted += len(step.emitted[0]) - 1
    kept = _cut(tokens, request)
    stopped = kept[-1] in request.stop_ids
    done = Generated(tuple(kept), "stop" if stopped else "length", rounds, drafted, accepted)
    return done, state


def stream(
    model: Model, state: State, drafter: Drafter, request: Request, row: int = 0
) -> Iterator[Round]:
    """The steps of :func:`generate`, as they happen.

    The first comes from the prefill, with one token and nothing drafted. Tokens of the last may
    reach beyond a stop token.

    Raises:
        ValueError: the prompt leaves no room in the context.
    """
    limit = model.info.max_context
    if len(request.prompt) >= limit:
        raise ValueError(
            f"a prompt of {len(request.prompt)} tokens leaves no room in a context of {limit}"
        )
    logits, state = _prefill(model, state, drafter, request.prompt, row)
    position = len(request.prompt)
    sampling = Sampling.of([request.params])
    chosen = int(_sample()(logits[None], sampling, np.array([position], np.int32))[0])
    step = Round(state, ((chosen,),), ())
    generated = 1
    yield step
    while True:
        emitted = step.emitted[0]
        left = min(request.max_tokens - generated, limit - 1 - position)
        if left < 1 or request.stop_ids.intersection(emitted):
            return
        live = Live(row, emitted[-1], position, request.params)
        step = run_round(model, step.state, drafter, [live], max_drafts=left - 1)
        position += len(step.emitted[0])
        generated += len(step.emitted[0])
        yield step


def _prefill(
    model: Model, state: State, drafter: Drafter, prompt: Sequence[int], row: int
) -> tuple[jax.Array, State]:
    state = model.reset(state, row)
    drafter.reset(row)
    for start in range(0, len(prompt), model.info.max_chunk):
        chunk = prompt[start : start + model.info.max_chunk]
        logits, features, state = model.prefill(state, row, chunk, start)
        drafter.extend(row, chunk, features)
    return logits, state


def _cut(tokens: list[int], request: Request) -> list[int]:
    ends = [i + 1 for i, token in enumerate(tokens) if token in request.stop_ids]
    return tokens[: min([*ends[:1], request.max_tokens])]


@cache
def _sample() -> Any:
    return jax.jit(sample)
