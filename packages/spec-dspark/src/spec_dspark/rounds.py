"""One round of speculative decoding, with any model and any drafter.

The drafter guesses K tokens after each sequence's anchor (the token chosen last), the target judges
anchors and drafts in one verify step, the accepted ones and one further token are emitted, and the
target's state moves by what it consumed.

Letters: S sequences, K drafts of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kda_mla_kernels.model import Model, State
from kda_mla_kernels.sampling import Sampling, SamplingParams

from spec_dspark.drafter import Drafter
from spec_dspark.verification import accept

__all__ = ["Live", "Round", "run_round"]


@dataclass(frozen=True)
class Live:
    """A sequence between two rounds."""

    row: int
    """Its row of the model's state."""
    anchor: int
    """The token chosen last, not yet consumed."""
    position: int
    """Where the anchor stands."""
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class Round:
    """What a round emitted, in the order of its sequences."""

    state: State
    emitted: tuple[tuple[int, ...], ...]
    """1..K + 1 tokens of each sequence; the last one is its next anchor."""
    drafted: tuple[int, ...]
    """How many drafts of each were judged."""


def run_round(
    model: Model,
    state: State,
    drafter: Drafter,
    live: Sequence[Live],
    max_drafts: int | None = None,
) -> Round:
    """Drafts, judges and commits once, for sequences in distinct rows.

    The drafter is asked for as many drafts as it makes, ``max_drafts``, the model's rows and the
    context of every sequence allow. The verify step has 1, 2, 4, ... rows a sequence, as few as
    hold the drafts that were found, so that few programs are compiled; with one row it is a plain
    decode step.

    Args:
        state: consumed; the next one is in the result.
        max_drafts: what the caller wants at most, e.g. because few tokens are left to generate.

    Raises:
        ValueError: no sequences, more than the model has rows, or one at the end of its context.
    """
    most = _most_drafts(model, drafter, live)
    asked = most if max_drafts is None else min(most, max_drafts)
    rows = [sequence.row for sequence in live]
    anchors = [sequence.anchor for sequence in live]
    positions = [sequence.position for sequence in live]
    sampling = Sampling.of([sequence.params for sequence in live])
    drafts, q = _propose(drafter, rows, anchors, sampling, asked)
    drafts, q = _resize(drafts, q, most)

    # The rows of missing drafts are judged as token 0, and never accepted.
    fed = np.concatenate([np.array(anchors, np.int32)[:, None], np.maximum(drafts, 0)], axis=1)
    verified = model.verify(state, rows, fed.tolist(), positions)
    first = np.array(positions, np.int32) + 1
    judged = _accept()(drafts, verified.logits, sampling, first, q)
    accepted, tokens = np.asarray(judged.accepted), np.asarray(judged.tokens)
    state = model.commit(verified.state, (accepted + 1).tolist())
    for s, row in enumerate(rows):
        consumed = int(accepted[s]) + 1
        drafter.extend(row, fed[s, :consumed].tolist(), verified.features[s, :consumed])
    emitted = tuple(tuple(tokens[s, : accepted[s] + 1].tolist()) for s in range(len(rows)))
    return Round(state, emitted, tuple((drafts >= 0).sum(axis=1).tolist()))


def _most_drafts(model: Model, drafter: Drafter, live: Sequence[Live]) -> int:
    if not live:
        raise ValueError("a round needs at least one sequence")
    if len(live) > model.info.max_rows:
        raise ValueError(f"{len(live)} sequences exceed the model's {model.info.max_rows} rows")
    limit = model.info.max_context
    room = limit - 1 - max(sequence.position for sequence in live)
    if room < 1:
        raise ValueError(f"a sequence stands at the end of the context of {limit} tokens")
    return min(drafter.max_drafts, model.info.max_rows // len(live) - 1, room - 1)


def _propose(
    drafter: Drafter, rows: list[int], anchors: list[int], sampling: Sampling, num_drafts: int
) -> tuple[np.ndarray, jax.Array | None]:
    """Drafts [S, K], and their distributions [S, K, V] if they were drawn."""
    if num_drafts < 1:
        return np.zeros((len(rows), 0), np.int32), None
    proposal = drafter.propose(rows, anchors, sampling, num_drafts)
    return np.asarray(proposal.tokens), proposal.probabilities


def _resize(
    drafts: np.ndarray, q: jax.Array | None, most: int
) -> tuple[np.ndarray, jax.Array | None]:
    """Cuts or pads K so that K + 1 is a power of two that holds the drafts, or ``most`` + 1."""
    longest = int((drafts >= 0).sum(axis=1).max(initial=0))
    width = min((1 << longest.bit_length()) - 1, most)
    kept = drafts[:, :width]
    padding = width - kept.shape[1]
    drafts = np.pad(kept, ((0, 0), (0, padding)), constant_values=-1)
    if q is None:
        return drafts, None
    return drafts, jnp.pad(q[:, :width], ((0, 0), (0, padding), (0, 0)))


@cache
def _accept() -> Any:
    return jax.jit(accept)
