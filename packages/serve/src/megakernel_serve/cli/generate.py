"""``megakernel generate``: continue a text on standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from megakernel_serve.cli.main import UsageError
from megakernel_serve.cli.streams import output, read_input, utf8

if TYPE_CHECKING:
    from megakernel_serve.cli.main import Invocation
    from megakernel_serve.engine import Engine
    from megakernel_serve.loading import LoadedModel

__all__ = ["run"]

DEFAULT_MAX_TOKENS = 200


def run(invocation: Invocation) -> int:
    """Runs the command."""
    prompt = _prompt(invocation.arguments["prompt"])
    out = output()
    from megakernel_serve.cli.terminal import status
    from megakernel_serve.engine import Engine
    from megakernel_serve.loading import choose, load

    loaded = load(choose(invocation), invocation.settings, progress=status.is_terminal)
    with Engine(loaded.model, max_waiting=1) as engine:
        engine.warm_up()  # so that the figures are of running, not of compiling
        _generate(engine, loaded, prompt, invocation, out)
    return 0


def _prompt(given: str | None) -> str:
    prompt = read_input() if given is None else utf8(given, "the prompt")
    if not prompt:
        raise UsageError("there is no prompt: give it as an argument or on standard input")
    return prompt


def _generate(
    engine: Engine, loaded: LoadedModel, prompt: str, invocation: Invocation, out: TextIO
) -> None:
    from megakernel_serve.cli.terminal import figures, prefill_progress, sampling_params, status
    from megakernel_serve.engine import Request
    from megakernel_serve.text import TextAnswer

    model, settings = loaded.model, invocation.settings
    ids = tuple(loaded.tokenizer.encode(prompt).ids)
    room = model.info.max_context - len(ids)
    # With no room left the request is submitted all the same: the engine says why it cannot be.
    request = Request(
        ids,
        settings.max_tokens or max(1, min(DEFAULT_MAX_TOKENS, room)),
        sampling_params(settings, model.generation),
    )
    answer, finish, handle = TextAnswer(loaded.tokenizer), None, engine.submit(request)
    print(prompt, end="", flush=True, file=out)
    with prefill_progress(len(ids), model.info.max_chunk) as bar:
        task = bar.add_task("", total=len(ids)) if bar else None
        for delta in handle:
            if bar and task is not None:
                bar.update(task, completed=delta.prefilled)
                if delta.prefilled == len(ids):
                    bar.stop()
                    bar = None
            print("".join(answer.push(delta.token_ids)), end="", flush=True, file=out)
            finish = delta.finish
    assert finish is not None  # the last delta carries it
    print("".join(answer.finish(finish.reason)), flush=True, file=out)
    line = figures(len(ids), answer.tokens + (finish.stop_id is not None), finish)
    status.print(line, soft_wrap=True)
