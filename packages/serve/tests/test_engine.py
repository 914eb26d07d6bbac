"""The engine: order, cancellation, back-pressure, failures, shutdown.

Not covered: a device call that never returns; its only sign is ``EngineStatus.idle_seconds``.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest
from bigram import BigramModel, eventually
from kda_mla_kernels.sampling import SamplingParams
from megakernel_serve.engine import (
    ContextLengthError,
    Engine,
    EngineBusyError,
    EngineFailedError,
    EngineStoppedError,
    NonFiniteLogitsError,
    Request,
    RequestFailedError,
    TokenIdError,
)


@pytest.fixture
def ask(model):
    def make(text="hi", max_tokens=50, **options):
        return Request(tuple(model.tokenizer.encode(text).ids), max_tokens, **options)

    return make


def text_of(model, result):
    return model.tokenizer.decode(list(result.token_ids))


def test_an_answer_ends_with_the_end_id_which_is_not_among_its_tokens(engine, model, ask):
    result = engine.submit(ask()).result()
    assert text_of(model, result) == "hello world"
    assert result.finish.reason == "stop"
    assert result.finish.stop_id == model.tokenizer.token_to_id("<end>")
    assert model.tokenizer.token_to_id("<end>") not in result.token_ids


def test_an_answer_is_cut_at_max_tokens(engine, ask):
    result = engine.submit(ask(max_tokens=3)).result()
    assert len(result.token_ids) == 3
    assert result.finish.reason == "length"
    assert result.finish.stop_id is None


def test_the_first_token_alone_can_be_the_whole_answer(engine, model, ask):
    result = engine.submit(ask(max_tokens=1)).result()
    assert text_of(model, result) == "hello"
    assert all(call[0] != "decode" for call in model.calls)


def test_end_ids_can_be_ignored_or_put_off_or_added(engine, model, ask):
    end = model.tokenizer.token_to_id("<end>")
    space = model.tokenizer.encode(" w").ids[0]
    answer_length = len(model.tokenizer.encode("hello world").ids)
    assert len(engine.submit(ask(max_tokens=20, ignore_eos=True)).result().token_ids) == 20
    late = engine.submit(ask(max_tokens=20, min_tokens=answer_length + 3)).result()
    assert late.token_ids.count(end) == 3  # the one that ends the answer is hidden
    assert late.finish.stop_id == end
    added = engine.submit(ask(stop_ids=frozenset([space]), ignore_eos=True)).result()
    assert added.finish.stop_id == space
    assert text_of(model, added) == "hello"


def test_long_prompts_are_fed_in_chunks_with_progress(engine, model, ask):
    request = ask("x" * 20)
    deltas = list(engine.submit(request))
    assert [call[2] for call in model.calls if call[0] == "prefill"] == [8, 8, 4]
    assert deltas[-1].prefilled == 20


def test_requests_run_together_and_each_gets_its_own_answer(engine, model, ask):
    model.script.replies = {"aaa": "hello from a", "bbb": "hello from the other b"}
    model.script.step_seconds = 0.01
    handles = [engine.submit(ask(text)) for text in ("aaa", "bbb")]
    assert text_of(model, handles[0].result()) == "hello from a"
    assert text_of(model, handles[1].result()) == "hello from the other b"
    assert ("decode", 2) in model.calls


def test_decoding_goes_on_between_the_chunks_of_a_long_prompt(engine, model, ask):
    model.script.step_seconds = 0.005
    first = engine.submit(ask(max_tokens=100, ignore_eos=True))
    eventually(lambda: ("decode", 1) in model.calls)
    before = len(model.calls)
    engine.submit(ask("x" * 80, max_tokens=1)).result()
    kinds = [call[0] for call in model.calls[before:]]
    first.cancel()
    chunks = [index for index, kind in enumerate(kinds) if kind == "prefill"]
    assert len(chunks) == 10
    assert all(later - earlier == 2 for earlier, later in itertools.pairwise(chunks))


def test_sampling_depends_on_the_seed_and_not_on_neighbours(engine, model, ask):
    flat = SamplingParams(temperature=2.0, seed=7)
    model._logits = lambda seen: 0.1 * (len(seen) * 7 % 5) * model_ramp(model)
    alone = engine.submit(ask(sampling=flat, max_tokens=12, ignore_eos=True)).result()
    pair = [
        engine.submit(ask(sampling=SamplingParams(2.0, seed=seed), max_tokens=12, ignore_eos=True))
        for seed in (8, 7)
    ]
    assert pair[1].result().token_ids == alone.token_ids
    assert pair[0].result().token_ids != alone.token_ids


def model_ramp(model):
    import numpy as np

    return np.linspace(0, 1, model.info.vocab_size, dtype=np.float32)


def test_deltas_can_be_read_in_an_event_loop(engine, model, ask):
    async def go():
        handles = [engine.submit(ask()) for _ in range(2)]
        return await asyncio.gather(*(handle.result_async() for handle in handles))

    assert [text_of(model, result) for result in asyncio.run(go())] == ["hello world"] * 2


def test_a_reader_that_comes_late_gets_everything_in_one_delta(engine, model, ask):
    handle = engine.submit(ask())
    eventually(lambda: handle.delivery.ended)
    deltas = list(handle)
    assert len(deltas) == 1
    assert model.tokenizer.decode(list(deltas[0].token_ids)) == "hello world"


def test_times_are_measured(engine, model, ask):
    model.script.step_seconds = 0.02
    timing = engine.submit(ask(max_tokens=4)).result().finish.timing
    assert 0.06 <= timing.decode < 5
    assert timing.queue >= 0
    assert 0 < timing.prefill < 5


def fill(engine, model, ask):
    """Holds the device in a prefill, with both rows taken."""
    model.script.gate = threading.Event()
    handles = [engine.submit(ask("x" * 20)) for _ in range(2)]
    eventually(lambda: engine.status().running == 2 and engine.status().waiting == 0)
    return handles


def test_a_cancelled_waiting_request_leaves_the_queue_and_never_starts(engine, model, ask):
    running = fill(engine, model, ask)
    waiting = engine.submit(ask("never"))
    waiting.cancel()
    assert engine.status().waiting == 0
    assert waiting.result().finish.reason == "abort"
    model.script.gate.set()
    for handle in running:
        handle.result()
    assert sum(call[0] == "prefill" for call in model.calls) == 6


def test_a_cancelled_prefill_stops_at_the_next_chunk(engine, model, ask):
    first, second = fill(engine, model, ask)
    first.cancel()
    model.script.gate.set()
    assert first.result().finish.reason == "abort"
    assert second.result().finish.reason == "stop"
    assert sum(call[:2] == ("prefill", 0) for call in model.calls) == 1


def test_a_cancelled_decode_frees_its_row(engine, model, ask):
    model.script.step_seconds = 0.005
    handle = engine.submit(ask(max_tokens=200, ignore_eos=True))
    eventually(lambda: ("decode", 1) in model.calls)
    handle.cancel()
    assert handle.result().finish.reason == "abort"
    eventually(lambda: engine.status().running == 0)
    handle.cancel()  # harmless


def test_a_full_queue_refuses_and_takes_again_once_there_is_room(engine, model, ask):
    fill(engine, model, ask)
    waiting = [engine.submit(ask()) for _ in range(3)]
    with pytest.raises(EngineBusyError, match="3 requests are waiting"):
        engine.submit(ask())
    waiting[0].cancel()
    last = engine.submit(ask())
    model.script.gate.set()
    assert last.result().finish.reason == "stop"


@pytest.mark.parametrize("where", ["fail_prefill", "fail_decode"])
def test_a_model_exception_fails_the_request_and_not_the_engine(engine, model, ask, where):
    setattr(model.script, where, RuntimeError("boom\n  File /secret"))
    with pytest.raises(RequestFailedError, match=r"the model failed: boom$"):
        engine.submit(ask()).result()
    setattr(model.script, where, None)
    assert text_of(model, engine.submit(ask()).result()) == "hello world"
    assert engine.status().phase == "running"


def test_tokens_before_a_failure_are_delivered_first(engine, model, ask):
    model.script.fail_decode = RuntimeError("boom")
    handle = engine.submit(ask())
    eventually(lambda: handle.delivery.ended)
    seen = []
    with pytest.raises(RequestFailedError):
        seen.extend(token for delta in handle for token in delta.token_ids)
    assert model.tokenizer.decode(seen) == "hello"


def test_an_engine_that_cannot_recover_fails_everybody_and_says_so(engine, model, ask):
    running = fill(engine, model, ask)
    waiting = engine.submit(ask())
    model.script.fail_prefill = RuntimeError("boom")
    model.script.fail_init = MemoryError("no memory")
    model.script.gate.set()
    for handle in running:
        with pytest.raises(RequestFailedError):
            handle.result()
    with pytest.raises(EngineFailedError, match="no memory"):
        waiting.result()
    eventually(lambda: engine.status().phase == "failed")
    with pytest.raises(EngineFailedError):
        engine.submit(ask())


def test_non_finite_logits_fail_only_their_own_request(engine, model, ask):
    model.script.nan_for = "bad"
    model.script.replies = {"bad": "hello nobody", "good": "hello you"}
    model.script.step_seconds = 0.01
    good, bad = engine.submit(ask("good")), engine.submit(ask("bad"))
    with pytest.raises(NonFiniteLogitsError):
        bad.result()
    assert text_of(model, good.result()) == "hello you"


def test_a_shutdown_ends_running_and_waiting_requests_at_once(engine, model, ask):
    model.script.step_seconds = 0.01
    handles = [engine.submit(ask(max_tokens=200, ignore_eos=True)) for _ in range(4)]
    eventually(lambda: ("decode", 2) in model.calls)
    assert engine.shutdown()
    for handle in handles:
        with pytest.raises(EngineStoppedError):
            handle.result()


def test_an_engine_that_is_shut_down_takes_no_more(engine, model, ask):
    model.script.decode_gate = threading.Event()
    handle = engine.submit(ask())
    eventually(lambda: ("decode", 1) in model.calls)
    started = time.monotonic()
    assert not engine.shutdown(timeout=0.1)
    assert time.monotonic() - started < 3
    with pytest.raises(EngineStoppedError):
        engine.submit(ask())
    with pytest.raises(EngineStoppedError):  # although its device call still hangs
        handle.result()
    model.script.decode_gate.set()
    eventually(lambda: engine.status().phase == "stopped")


def test_a_context_that_is_just_full_is_used_to_the_end(engine, model, ask):
    room = model.info.max_context
    full = ask("x" * (room - 2), max_tokens=2, ignore_eos=True)
    assert len(engine.submit(full).result().token_ids) == 2
    with pytest.raises(ContextLengthError, match="257 were requested"):
        engine.submit(ask("x" * (room - 1), max_tokens=2))


def test_requests_that_cannot_be_right_are_refused(engine, model):
    with pytest.raises(TokenIdError, match="prompt token id 5000 is outside"):
        engine.submit(Request((1, 5000), 1))
    with pytest.raises(TokenIdError, match="stop token id 5000"):
        engine.submit(Request((1,), 1, stop_ids=frozenset([5000])))
    with pytest.raises(ValueError, match="prompt is empty"):
        Request((), 1)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        Request((1,), 0)
    with pytest.raises(ValueError, match="min_tokens must lie between 0 and max_tokens"):
        Request((1,), 1, min_tokens=2)
    with pytest.raises(ValueError, match="max_waiting must be at least 1"):
        Engine(model, max_waiting=0)


def test_the_smallest_context_warms_up_with_what_fits():
    model = BigramModel(context=2)
    with Engine(model) as engine:
        engine.warm_up()
    assert [call[0] for call in model.calls if call[0] in ("prefill", "decode")] == ["prefill"]
