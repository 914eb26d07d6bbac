"""The rows of a model's state, and the sequences that occupy them. Device thread only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from kda_mla_kernels.model import Model
from kda_mla_kernels.sampling import Sampling, SamplingParams, sample

from megakernel_serve.engine.delivery import Finish, FinishReason, Timing
from megakernel_serve.engine.errors import NonFiniteLogitsError
from megakernel_serve.engine.request import RequestHandle

__all__ = ["Rows", "Sequence"]


@jax.jit
def _finite(logits: jax.Array) -> jax.Array:
    """[R, V] -> bool [R]. -inf is legal: it masks ids that must not be chosen."""
    return jnp.isfinite(jnp.max(logits, axis=-1))


@dataclass(eq=False)
class Sequence:
    """One request in one row."""

    handle: RequestHandle
    row: int
    submitted: float
    end_ids: frozenset[int]
    started: float = field(default_factory=time.monotonic)
    position: int = 0
    """Tokens that the row has seen; the position of the next one to feed."""
    generated: int = 0
    token: int = -1
    """The last chosen token, not fed yet."""
    first_token_at: float | None = None

    @property
    def prefilling(self) -> bool:
        return self.first_token_at is None

    def timing(self) -> Timing:
        now = time.monotonic()
        first = self.first_token_at or now
        return Timing(self.started - self.submitted, first - self.started, now - first)

    def end(self, reason: FinishReason, stop_id: int | None = None) -> None:
        self.handle.delivery.finish(Finish(reason, self.timing(), stop_id))

    def choose(self, token: int) -> None:
        """Takes the next token: tells the reader, and ends the request if it is the last one."""
        request = self.handle.request
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self.token = token
        self.generated += 1
        if token in self.end_ids and self.generated > request.min_tokens:
            self.end("stop", token)
            return
        self.handle.delivery.put_token(token)
        if self.generated == request.max_tokens:
            self.end("length")


class Rows:
    """Owns the state of a model. Each call moves it by one prefill chunk or one decode step."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._state = model.init_state()
        self._slots: list[Sequence | None] = [None] * model.info.max_rows
        self._sampling: Sampling | None = None
        chat_ids = model.chat_format.stop_ids if model.chat_format else frozenset()
        self._end_ids = model.generation.stop_ids | chat_ids

    @property
    def sequences(self) -> list[Sequence]:
        """The running sequences, by row."""
        return [sequence for sequence in self._slots if sequence is not None]

    def has_free(self) -> bool:
        """True if another sequence can start."""
        return None in self._slots

    def admit(self, handle: RequestHandle, submitted: float) -> None:
        """Puts a request into a free row and empties what the last one left there."""
        row = self._slots.index(None)
        request = handle.request
        own = frozenset() if request.ignore_eos else self._end_ids
        self._slots[row] = Sequence(handle, row, submitted, request.stop_ids | own)
        self._sampling = None
        self._state = self._model.reset(self._state, row)

    def drop_ended(self) -> None:
        """Frees the rows of requests that ended or whose caller has left."""
        for sequence in self.sequences:
            if sequence.handle.cancelled:
                sequence.end("abort")
            if sequence.handle.delivery.ended:
                self._slots[sequence.row] = None
                self._sampling = None

    def prefill(self) -> None:
        """Feeds one chunk to the sequence that has waited longest for its first token."""
        waiting = [sequence for sequence in self.sequences if sequence.prefilling]
        if not waiting:
            return
        sequence = min(waiting, key=lambda one: one.submitted)
        prompt = sequence.handle.request.prompt
        chunk = prompt[sequence.position : sequence.position + self._model.info.max_chunk]
        logits, _, self._state = self._model.prefill(
            self._state, sequence.row, chunk, sequence.position
        )
        sequence.position += len(chunk)
        sequence.handle.delivery.put_progress(sequence.position)
        if sequence.position == len(prompt):
            self._choose_first(sequence, logits)

    def decode(self) -> None:
        """One step of all sequences that have a token to feed."""
        running = [sequence for sequence in self.sequences if not sequence.prefilling]
        running = [sequence for sequence in running if not sequence.handle.delivery.ended]
        if not running:
            return
        count = len(self._slots)
        tokens, positions, active = [0] * count, [0] * count, [False] * count
        for sequence in running:
            tokens[sequence.row] = sequence.token
            positions[sequence.row] = sequence.position
            active[sequence.row] = True
        stepped = self._model.decode(
            self._state, tokens, positions, active, self._row_sampling(), with_logits=True
        )
        self._state = stepped.state
        assert stepped.logits is not None  # they were asked for
        finite, chosen = np.asarray(_finite(stepped.logits)), np.asarray(stepped.tokens)
        for sequence in running:
            sequence.position += 1
            self._take(sequence, int(chosen[sequence.row]), bool(finite[sequence.row]))

    def _choose_first(self, sequence: Sequence, logits: jax.Array) -> None:
        # The shape of a decode step, so that the first token is rounded as all others are.
        spread = jnp.broadcast_to(logits, (len(self._slots), logits.shape[-1]))
        positions = np.full(len(self._slots), sequence.position, np.int32)
        chosen = np.asarray(sample(spread, self._row_sampling(), positions))
        finite = np.asarray(_finite(spread))
        self._take(sequence, int(chosen[sequence.row]), bool(finite[sequence.row]))

    def _take(self, sequence: Sequence, token: int, finite: bool) -> None:
        if finite:
            sequence.choose(token)
        else:
            sequence.handle.delivery.fail(
                NonFiniteLogitsError(
                    "the model returned logits that are not finite for this request"
                )
            )

    def _row_sampling(self) -> Sampling:
        if self._sampling is None:
            self._sampling = Sampling.of(
                [slot.handle.request.sampling if slot else SamplingParams() for slot in self._slots]
            )
        return self._sampling
