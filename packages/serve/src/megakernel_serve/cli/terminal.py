"""What the terminal commands share: where to write, how to sample, an answer's figures."""

from __future__ import annotations

import secrets
from contextlib import nullcontext
from typing import Any

from kda_mla_kernels.model import GenerationDefaults
from kda_mla_kernels.sampling import SamplingParams
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from megakernel_serve.engine import Finish
from megakernel_serve.settings import Settings

__all__ = ["figures", "prefill_progress", "sampling_params", "status"]

status = Console(stderr=True, highlight=False)
"""Everything that is not the answer itself."""


def sampling_params(settings: Settings, defaults: GenerationDefaults) -> SamplingParams:
    """The settings over the checkpoint's own defaults; without a seed, a new one."""

    def pick(name: str) -> Any:
        chosen = getattr(settings, name)
        return getattr(defaults, name) if chosen is None else chosen

    seed = secrets.randbits(64) if settings.seed is None else settings.seed
    return SamplingParams(
        temperature=pick("temperature"),
        top_k=pick("top_k"),
        top_p=pick("top_p"),
        min_p=pick("min_p"),
        seed=seed,
    )


def prefill_progress(total: int, chunk: int) -> Any:
    """A progress bar for prompts that need more than one chunk, if anybody can see it."""
    if not status.is_terminal or total <= chunk:
        return nullcontext()
    columns = (TextColumn("reading prompt"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=status, transient=True)


def figures(prompt_tokens: int, tokens: int, finish: Finish) -> str:
    """One line about a finished answer, all of it measured."""
    timing = finish.timing
    line = f"{prompt_tokens} prompt tokens in {timing.prefill:.2f} s, "
    line += f"{tokens} tokens in {timing.decode:.2f} s"
    if tokens > 1 and timing.decode > 0:  # the first token belongs to the prompt's time
        line += f" ({(tokens - 1) / timing.decode:.1f} tokens/s)"
    return f"{line}, ended by {finish.reason}"
