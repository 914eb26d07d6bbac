"""A model family for tests: a scripted bigram model with a real tokenizer and a real chat format.

Each token has one fixed successor, so that every answer is known; `Script` changes what happens.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kda_mla_kernels.chat import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatError,
    ChatEvent,
    ChatOptions,
    ContentText,
    Message,
    ReasoningText,
    Rendered,
)
from kda_mla_kernels.errors import CheckpointError
from kda_mla_kernels.model import Decoded, GenerationDefaults, ModelInfo, Prefilled, Verified
from kda_mla_kernels.sampling import Sampling
from kda_mla_kernels.sampling import sample as _plain_sample
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, THINK, END_THINK, CALL, END_CALL, USER = (
    "<end>",
    "<think>",
    "</think>",
    "<call>",
    "</call>",
    "<user>",
)
sample = jax.jit(_plain_sample)
PADDING_ROWS = 3
"""Rows of the logits that the tokenizer does not know."""


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def events(response: Any) -> list[dict[str, Any]]:
    """The events of a whole stream, which must end as it should."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE over all bytes, with a few merges and the markers of the chat format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("ð", "Ł")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(USER, special=True)])
    tokenizer.add_tokens([AddedToken(word) for word in (THINK, END_THINK, CALL, END_CALL)])
    return tokenizer


class BigramChat:
    """``<user>TEXT<end>`` per message, then ``<think>``. Calls: ``<call>NAME{JSON}</call>``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.stop_ids = frozenset([tokenizer.token_to_id(END)])

    def render(self, messages: Sequence[Message], options: ChatOptions) -> Rendered:
        if options.effort == "xhigh":
            raise ChatError("this format knows no effort 'xhigh'", param="reasoning_effort")
        if messages[-1]["role"] not in ("user", "tool"):
            raise ChatError("the last message must be from the user")
        content = messages[-1]["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        thinking = bool(options.thinking) and options.effort != "none"
        prompt = f"{USER}{text}" + (THINK if thinking else "")
        return Rendered(tuple(self._tokenizer.encode(prompt).ids), thinking, options)

    def parser(self, rendered: Rendered) -> BigramParser:
        return BigramParser(self._tokenizer, rendered.thinking)


class BigramParser:
    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._call: list[int] | None = None
        self._calls = 0
        self._named = False
        self.reasoning_tokens = 0

    def push(self, token_ids: Sequence[int]) -> list[ChatEvent]:
        return [event for token in token_ids for event in self._one(token)]

    def _one(self, token: int) -> list[ChatEvent]:
        word = self._tokenizer.id_to_token(token)
        if word == END_THINK:
            self._thinking = False
            return []
        if word == CALL:
            self._call, self._named = [], False
            return []
        if word == END_CALL:
            self._call, self._calls = None, self._calls + 1
            return [CallEnd(self._calls - 1)]
        if self._call is not None:
            return self._in_call(token)
        text = self._tokenizer.decode([token])
        if self._thinking:
            self.reasoning_tokens += 1
            return [ReasoningText(text)]
        return [ContentText(text)]

    def _in_call(self, token: int) -> list[ChatEvent]:
        assert self._call is not None
        text = self._tokenizer.decode([token])
        if not self._named and text != "{":
            self._call.append(token)
            return []
        start = [] if self._named else [CallStart(self._calls, self._tokenizer.decode(self._call))]
        self._named = True
        return [*start, CallArguments(self._calls, text)]

    def finish(self, reason: str = "stop") -> list[ChatEvent]:
        return []


@dataclass
class Script:
    """What the model says and how it misbehaves. ``replies`` map a prompt's text to an answer."""

    replies: dict[str, str] = field(default_factory=dict)
    default: str = "hello world"
    step_seconds: float = 0.0
    fail_prefill: Exception | None = None
    fail_decode: Exception | None = None
    fail_init: Exception | None = None
    nan_for: str | None = None
    """A prompt whose logits are not finite from the second token on."""
    gate: threading.Event | None = None
    """If set, each prefill chunk waits for this event."""
    decode_gate: threading.Event | None = None


class BigramModel:
    """Implements the protocol on NumPy, and checks that it is driven by the rules."""

    def __init__(
        self, rows: int = 2, context: int = 256, chunk: int = 8, name: str = "bigram"
    ) -> None:
        self.tokenizer = build_tokenizer()
        self.script = Script()
        self.generation = GenerationDefaults(stop_ids=frozenset([self.tokenizer.token_to_id(END)]))
        self.chat_format = BigramChat(self.tokenizer)
        self.calls: list[tuple[Any, ...]] = []
        self.thread: int | None = None
        self.info = ModelInfo(
            family="bigram",
            name=name,
            backend="xla",
            numerics="f32",
            ranks=1,
            legal_ranks=(1,),
            vocab_size=self.tokenizer.get_vocab_size() + PADDING_ROWS,
            hidden_size=4,
            num_layers=1,
            parameters=1000,
            weight_bytes=4000,
            max_rows=rows,
            max_context=context,
            max_chunk=chunk,
            feature_layers=(),
        )

    def init_state(self) -> dict[str, Any]:
        self._one_thread()
        if self.script.fail_init:
            raise self.script.fail_init
        return {"rows": [[] for _ in range(self.info.max_rows)], "used": False}

    def prefill(self, state, row, tokens, start, *, all_logits=False) -> Prefilled:
        state = self._next(state)
        assert 1 <= len(tokens) <= self.info.max_chunk
        assert start == len(state["rows"][row])
        self.calls.append(("prefill", row, len(tokens)))
        if self.script.gate:
            assert self.script.gate.wait(20)
        if self.script.fail_prefill:
            raise self.script.fail_prefill
        state["rows"][row] += list(tokens)
        return Prefilled(
            jnp.asarray(self._logits(state["rows"][row])), jnp.zeros((len(tokens), 0, 4)), state
        )

    def decode(
        self, state, tokens, positions, active, sampling=None, *, with_logits=False
    ) -> Decoded:
        state = self._next(state)
        self.calls.append(("decode", sum(active)))
        time.sleep(self.script.step_seconds)
        if self.script.decode_gate:
            assert self.script.decode_gate.wait(20)
        if self.script.fail_decode:
            raise self.script.fail_decode
        logits = np.zeros((self.info.max_rows, self.info.vocab_size), np.float32)
        for row, on in enumerate(active):
            if on:
                assert positions[row] == len(state["rows"][row])
                state["rows"][row].append(tokens[row])
                logits[row] = self._logits(state["rows"][row])
        sampling = sampling or Sampling.greedy(self.info.max_rows)
        chosen = sample(jnp.asarray(logits), sampling, jnp.asarray(positions) + 1)
        return Decoded(
            jnp.where(jnp.asarray(active), chosen, -1),
            jnp.asarray(logits) if with_logits else None,
            state,
        )

    def verify(self, state, rows, tokens, positions) -> Verified:
        raise NotImplementedError

    def commit(self, state, accepted):
        raise NotImplementedError

    def reset(self, state, row):
        state = self._next(state)
        state["rows"][row] = []
        return state

    def snapshot(self, state, row, length):
        return list(state["rows"][row])

    def restore(self, state, row, snap):
        state = self._next(state)
        state["rows"][row] = list(snap)
        return state

    def _one_thread(self) -> None:
        me = threading.get_ident()
        assert self.thread in (None, me), "two threads drive the model"
        self.thread = me

    def _next(self, state: dict[str, Any]) -> dict[str, Any]:
        self._one_thread()
        assert not state["used"], "a state was used twice"
        state["used"] = True
        return {"rows": state["rows"], "used": False}

    def _logits(self, seen: Sequence[int]) -> np.ndarray:
        """The scripted answer's next token, then the end token for ever."""
        text = self.tokenizer.decode(list(seen), skip_special_tokens=True)
        prompts = [*self.script.replies, ""]
        prompt = max((one for one in prompts if text.startswith(one)), key=len)
        answer = self.script.replies.get(prompt, self.script.default)
        ids = self.tokenizer.encode(answer).ids
        prompt_length = len(self.tokenizer.encode(prompt).ids) if prompt else None
        logits = np.zeros(self.info.vocab_size, np.float32)
        said = self._said(seen, prompt_length, ids)
        if self.script.nan_for and prompt == self.script.nan_for and said > 0:
            return np.full_like(logits, np.nan)
        end = self.tokenizer.token_to_id(END)
        logits[end if said == len(ids) or seen[-1] == end else ids[said]] = 30.0
        return logits

    def _said(self, seen: Sequence[int], prompt_length: int | None, ids: Sequence[int]) -> int:
        """How many tokens of the answer stand at the end of the row."""
        for said in range(min(len(ids), len(seen)), 0, -1):
            if list(seen[-said:]) == list(ids[:said]):
                return said
        return 0


@dataclass(frozen=True)
class BigramPackage:
    """The entry point object."""

    family: str = "bigram"
    model_types: frozenset[str] = frozenset(["bigram"])
    default_repo: str = "example/bigram"
    variable_prefix: str = "BIGRAM"

    def embedded_checkpoint(self) -> Path:
        return Path(__file__).parent / "bigram_checkpoint"

    def load(
        self,
        checkpoint,
        *,
        revision=None,
        devices=None,
        backend="auto",
        numerics="auto",
        max_rows=8,
        max_context=None,
        feature_layers=(),
        progress=False,
    ) -> BigramModel:
        path = Path(checkpoint) / "config.json"
        if not path.exists():
            raise CheckpointError(f"{checkpoint} has no config.json")
        config: Mapping[str, Any] = json.loads(path.read_text())
        model = BigramModel(rows=max_rows, context=max_context or 256, name=Path(checkpoint).name)
        time.sleep(config.get("load_seconds", 0))
        model.script.replies.update(config.get("replies", {}))
        model.script.step_seconds = config.get("step_seconds", 0)
        if not config.get("tokenizer", True):
            model.info = replace(model.info, name="mute")
            model.chat_format = model.tokenizer = None
        if "default" in config:
            model.script.default = config["default"]
        if devices is not None:
            assert all(isinstance(device, jax.Device) for device in devices)
            model.info = replace(model.info, ranks=len(devices))
        return model


package = BigramPackage()
