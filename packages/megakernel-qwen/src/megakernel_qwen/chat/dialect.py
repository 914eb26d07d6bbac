"""What differs between the chat templates of the family's generations."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kda_mla_kernels.errors import CheckpointError

__all__ = ["QWEN3_8", "Dialect", "read_dialect"]


@dataclass(frozen=True)
class Dialect:
    """Defaults of one generation. A request's own options win over them."""

    effort_lines: bool = True
    """Whether the system turn begins with a line about the reasoning effort."""
    thinks_by_default: bool = True
    keeps_reasoning: bool = True
    """Whether turns before the last user query keep their reasoning by default."""


QWEN3_8 = Dialect()


def read_dialect(folder: str | Path) -> Dialect:
    """Tells the generation from the checkpoint's own chat template, which is read, never run.

    A folder without a template gets the rules of Qwen3.8.

    Raises:
        CheckpointError: the file that should hold the template cannot be read.
    """
    template = _template(Path(folder))
    if not template:
        return QWEN3_8
    newest = "Reasoning effort is set to" in template
    return Dialect(
        effort_lines=newest,
        # The smallest models test for "is true", all others for "is false".
        thinks_by_default="enable_thinking is true" not in template,
        keeps_reasoning=newest,
    )


def _template(folder: Path) -> str:
    try:
        path = folder / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        path = folder / "tokenizer_config.json"
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
            return found if isinstance(found, str) else ""
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return ""
