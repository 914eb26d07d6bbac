"""A toy target that keeps the model protocol to the letter and notices who does not."""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kda_mla_kernels.model import Decoded, GenerationDefaults, ModelInfo, Prefilled, Verified
from kda_mla_kernels.sampling import Sampling, sample

SAMPLE = jax.jit(sample)


@dataclass
class ToyState:
    """What each row has consumed, and what a verify step has left to be committed."""

    rows: list[tuple[int, ...]]
    pending: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    used: bool = field(default=False, compare=False)


class ToyModel:
    """Logits depend on the last token, and a little on the sum of all: a wrong commit shows.

    Half of the time the last token alone decides, so that text repeats and can be looked up.
    """

    vocab = 16

    def __init__(self, max_rows=8, max_context=96, max_chunk=5):
        random = np.random.default_rng(5)
        self.by_last = random.normal(size=(self.vocab, self.vocab)).astype(np.float32) * 2
        self.by_sum = random.normal(size=(7, self.vocab)).astype(np.float32)
        self.generation = GenerationDefaults()
        self.chat_format = self.tokenizer = None
        self.verify_calls = []
        self.info = ModelInfo(
            family="toy",
            name="toy",
            backend="xla",
            numerics="f32",
            ranks=1,
            legal_ranks=(1,),
            vocab_size=self.vocab,
            hidden_size=1,
            num_layers=1,
            parameters=0,
            weight_bytes=0,
            max_rows=max_rows,
            max_context=max_context,
            max_chunk=max_chunk,
            feature_layers=(0,),
        )

    def _use(self, state, pending=False):
        assert not state.used, "a state was used twice"
        assert (state.pending is not None) == pending, "verify and commit must alternate"
        state.used = True

    def _logits(self, consumed):
        return self.by_last[consumed[-1]] + self.by_sum[sum(consumed) % 7]

    def _feed(self, consumed, tokens, start):
        assert start == len(consumed), f"position {start} after {len(consumed)} tokens"
        assert start + len(tokens) <= self.info.max_context
        assert all(0 <= token < self.vocab for token in tokens)
        return [(*consumed, *tokens[: i + 1]) for i in range(len(tokens))]

    def _features(self, histories):
        """The sum of what was consumed: tells a drafter's test which tokens these belong to."""
        return jnp.array([[[float(sum(history))]] for history in histories])

    def init_state(self):
        return ToyState([()] * self.info.max_rows)

    def reset(self, state, row):
        self._use(state)
        rows = list(state.rows)
        rows[row] = ()
        return ToyState(rows)

    def prefill(self, state, row, tokens, start, *, all_logits=False):
        self._use(state)
        assert 1 <= len(tokens) <= self.info.max_chunk
        histories = self._feed(state.rows[row], tuple(tokens), start)
        rows = list(state.rows)
        rows[row] = histories[-1]
        logits = [self._logits(history) for history in histories]
        out = np.stack(logits) if all_logits else logits[-1]
        return Prefilled(jnp.asarray(out), self._features(histories), ToyState(rows))

    def decode(self, state, tokens, positions, active, sampling=None, *, with_logits=False):
        self._use(state)
        rows, logits = list(state.rows), np.zeros((self.info.max_rows, self.vocab), np.float32)
        for row, on in enumerate(active):
            if on:
                rows[row] = self._feed(rows[row], (tokens[row],), positions[row])[-1]
                logits[row] = self._logits(rows[row])
        sampling = sampling or Sampling.greedy(self.info.max_rows)
        chosen = SAMPLE(jnp.asarray(logits), sampling, jnp.asarray(positions) + 1)
        chosen = jnp.where(jnp.asarray(active), chosen, -1)
        return Decoded(chosen, jnp.asarray(logits) if with_logits else None, ToyState(rows))

    def verify(self, state, rows, tokens, positions):
        self._use(state)
        assert len(set(rows)) == len(rows)
        assert sum(map(len, tokens)) <= self.info.max_rows
        self.verify_calls.append([len(sequence) for sequence in tokens])
        fed = [
            self._feed(state.rows[row], tuple(sequence), start)
            for row, sequence, start in zip(rows, tokens, positions)
        ]
        logits = np.array([[self._logits(history) for history in histories] for histories in fed])
        features = jnp.stack([self._features(histories) for histories in fed])
        pending = tuple((row, tuple(sequence)) for row, sequence in zip(rows, tokens))
        return Verified(jnp.asarray(logits), features, ToyState(state.rows, pending))

    def commit(self, state, accepted):
        self._use(state, pending=True)
        rows = list(state.rows)
        for (row, tokens), count in zip(state.pending, accepted):
            rows[row] = (*rows[row], *tokens[:count])
        return ToyState(rows)

    def snapshot(self, state, row, length):
        assert len(state.rows[row]) == length
        return state.rows[row]

    def restore(self, state, row, snap):
        self._use(state)
        rows = list(state.rows)
        rows[row] = snap
        return ToyState(rows)


@pytest.fixture
def toy_model():
    return ToyModel()


@pytest.fixture
def make_model():
    return ToyModel


@pytest.fixture
def decode_plainly():
    """Generation without drafts: prefill and one decode step per token."""

    def decode(model, prompt, count, params):
        state = model.init_state()
        for start in range(0, len(prompt), model.info.max_chunk):
            chunk = prompt[start : start + model.info.max_chunk]
            logits, _, state = model.prefill(state, 0, chunk, start)
        rows = model.info.max_rows
        first = SAMPLE(logits[None], Sampling.of([params]), jnp.array([len(prompt)]))
        tokens = [int(first[0])]
        sampling = Sampling.of([params] + [replace(params, seed=99)] * (rows - 1))
        while len(tokens) < count:
            at = [len(prompt) + len(tokens) - 1] * rows
            feed, active = [tokens[-1]] * rows, [True] + [False] * (rows - 1)
            chosen, _, state = model.decode(state, feed, at, active, sampling)
            tokens.append(int(chosen[0]))
        return tuple(tokens)

    return decode
