"""Every setting of the command line, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megakernel_serve.settings.kinds import (
    NAME,
    SHARE,
    SWITCH,
    UTF8,
    WORDS,
    Kind,
    number,
    one_of,
    whole_number,
)

__all__ = ["Option", "Settings", "all_options", "options"]

SEED = whole_number(-(2**63), 2**64 - 1)
"""What the HTTP interface takes too; a seed's low 64 bits count."""


@dataclass(frozen=True)
class Option:
    """One line of the table."""

    name: str
    default: Any
    kind: Kind
    help: str
    group: str
    metavar: str
    """What help texts call the value."""

    @property
    def shown_default(self) -> Any:
        """The default for help texts; None if there is nothing to show."""
        return None if self.default in (None, ()) else self.default


def _setting(default: Any, kind: Kind, help: str, group: str, metavar: str = "TEXT") -> Any:
    return field(
        default=default,
        metadata={"kind": kind, "help": help, "group": group, "metavar": metavar},
    )


@dataclass(frozen=True)
class Settings:
    """The resolved settings. ``None`` means: not set, the model or the program decides.

    Groups say which commands take a flag: ``model`` all that load one, ``sampling`` and ``chat``
    those that generate, ``server`` those that listen.
    """

    model: str | None = _setting(
        None,
        NAME,
        "checkpoint folder, Hugging Face repository (also ORGANISATION/NAME@REVISION), or family",
        "model",
        metavar="MODEL",
    )
    revision: str | None = _setting(
        None, NAME, "branch, tag or commit of a repository", "model", metavar="NAME"
    )
    weights: str | None = _setting(
        None, NAME, "folder of weights converted for these devices", "model", metavar="FOLDER"
    )
    context: int | None = _setting(None, whole_number(2), "positions per row", "model", metavar="N")
    rows: int | None = _setting(
        None,
        whole_number(1),
        "sequences that run at the same time (default: 8 to serve, 1 in the terminal)",
        "model",
        metavar="N",
    )
    devices: int | None = _setting(
        None, whole_number(1), "ranks to use; on CPU, virtual ones", "model", metavar="N"
    )
    backend: str = _setting(
        "auto", one_of("auto", "megakernel", "xla"), "what runs a step", "model"
    )
    numerics: str = _setting("auto", one_of("auto", "f32", "bf16"), "numerics policy", "model")
    max_tokens: int | None = _setting(
        None, whole_number(1), "most tokens to generate per answer", "sampling", metavar="N"
    )
    temperature: float | None = _setting(None, number(0, 2), "0 is greedy", "sampling", metavar="T")
    top_p: float | None = _setting(
        None, SHARE, "keep the likeliest tokens up to this probability", "sampling", metavar="P"
    )
    top_k: int | None = _setting(
        None, whole_number(0), "keep the k likeliest tokens; 0 keeps all", "sampling", metavar="K"
    )
    min_p: float | None = _setting(
        None,
        number(0, 1),
        "drop tokens below this share of the likeliest",
        "sampling",
        metavar="P",
    )
    seed: int | None = _setting(None, SEED, "makes sampling repeatable", "sampling", metavar="N")
    system: str | None = _setting(None, UTF8, "system message", "terminal", metavar="TEXT")
    thinking: bool | None = _setting(None, SWITCH, "let the model reason first", "chat")
    effort: str | None = _setting(
        None,
        one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "reasoning effort, as far as the chat format knows it",
        "chat",
    )
    chat_template: str | None = _setting(
        None,
        NAME,
        "a Jinja chat template instead of the model's own format: a file, or 'auto' for the"
        " checkpoint's",
        "chat",
        metavar="FILE",
    )
    host: str = _setting("127.0.0.1", NAME, "address to listen on", "server", metavar="HOST")
    port: int = _setting(
        8000, whole_number(0, 65535), "port to listen on; 0 picks a free one", "server", metavar="N"
    )
    served_model_name: tuple[str, ...] = _setting(
        (), WORDS, "name that clients ask for (repeatable)", "server", metavar="NAME"
    )
    api_key: tuple[str, ...] = _setting(
        (), WORDS, "key that clients must send (repeatable)", "server", metavar="KEY"
    )
    queue: int = _setting(
        256, whole_number(1), "requests that may wait before clients get 503", "server", metavar="N"
    )
    cors_origins: tuple[str, ...] = _setting(
        ("*",),
        WORDS,
        "origins whose pages may call (repeatable)",
        "server",
        metavar="ORIGIN",
    )
    max_body_mb: int = _setting(
        32, whole_number(1), "largest request body, in MiB", "server", metavar="N"
    )
    drain_seconds: int = _setting(
        30,
        whole_number(0),
        "time for running requests after SIGTERM or Ctrl-C",
        "server",
        metavar="N",
    )


def all_options() -> list[Option]:
    """All settings, in the table's order."""
    return [Option(one.name, one.default, **one.metadata) for one in fields(Settings)]


def options(groups: Sequence[str]) -> list[Option]:
    """The settings of some groups, in the table's order."""
    return [option for option in all_options() if option.group in groups]
