"""Every setting of the command line, in one table.

A setting comes from the first of these that names it: flag, environment variable, ``.env`` in the
working directory, configuration file, default. The flag of ``max_tokens`` is ``--max-tokens``, its
variable ``MEGAKERNEL_MAX_TOKENS``, its key in the configuration file ``max_tokens``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

__all__ = ["CONFIG_NAME", "Layers", "Settings", "SettingsError", "Source", "flag", "variable"]

CONFIG_NAME = "megakernel.toml"
VARIABLE_PREFIX = "MEGAKERNEL_"


class SettingsError(ValueError):
    """A setting has a value that it cannot have; the message says where it came from."""


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError
        return value

    parse.__name__ = f"whole number >= {least}"
    return parse


def _number(low: float, high: float, name: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError
        return value

    parse.__name__ = name
    return parse


def _top_p(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise ValueError
    return value


def _switch(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def _seed(text: str) -> int:
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word for word in (part.strip() for part in text.split(",")) if word)
    if not words:  # --api-key "$KEY" with an empty KEY must not open the server to everybody
        raise ValueError
    return words


def _text(text: str) -> str:
    return text


_top_p.__name__ = "number above 0, up to 1"
_switch.__name__ = "true or false"
_seed.__name__ = "whole number"
_words.__name__ = "comma-separated list"
_text.__name__ = "text"


def _option(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    group: str,
    **extra: Any,
) -> Any:
    """``extra``: ``choices`` (legal words), ``metavar``, ``many`` (the flag may be repeated)."""
    return field(default=default, metadata={"parse": parse, "help": help, "group": group, **extra})


@dataclass(frozen=True)
class Settings:
    """The resolved settings. ``None`` means: not set, the model or the program decides.

    Groups say which commands take a flag: ``model`` all that load one, ``sampling`` and ``chat``
    those that generate, ``server`` those that listen.
    """

    model: str | None = _option(
        None, _text, "checkpoint folder or Hugging Face repository", "model", metavar="MODEL"
    )
    revision: str | None = _option(None, _text, "branch, tag or commit of a repository", "model")
    context: int | None = _option(None, _integer(2), "positions per row", "model", metavar="N")
    rows: int | None = _option(
        None,
        _integer(1),
        "sequences that run at the same time (default: 8 to serve, 1 in the terminal)",
        "model",
        metavar="N",
    )
    devices: int | None = _option(
        None, _integer(1), "ranks to use; on CPU, virtual ones", "model", metavar="N"
    )
    backend: str = _option(
        "auto", _text, "what runs a step", "model", choices=("auto", "xla", "megakernel")
    )
    numerics: str = _option(
        "auto", _text, "numerics policy", "model", choices=("auto", "f32", "bf16")
    )
    max_tokens: int | None = _option(
        None, _integer(1), "most tokens to generate per answer", "sampling", metavar="N"
    )
    temperature: float | None = _option(
        None, _number(0, 2, "number from 0 to 2"), "0 is greedy", "sampling", metavar="T"
    )
    top_p: float | None = _option(
        None, _top_p, "keep the likeliest tokens up to this probability", "sampling", metavar="P"
    )
    top_k: int | None = _option(
        None, _integer(0), "keep the k likeliest tokens; 0 keeps all", "sampling", metavar="K"
    )
    min_p: float | None = _option(
        None,
        _number(0, 1, "number from 0 to 1"),
        "drop tokens below this share of the likeliest",
        "sampling",
        metavar="P",
    )
    seed: int | None = _option(None, _seed, "makes sampling repeatable", "sampling", metavar="N")
    system: str | None = _option(None, _text, "system message", "terminal", metavar="TEXT")
    thinking: bool | None = _option(None, _switch, "let the model reason first", "chat")
    effort: str | None = _option(
        None,
        _text,
        "reasoning effort, as far as the chat format knows it",
        "chat",
        choices=("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    )
    chat_template: str | None = _option(
        None,
        _text,
        "a Jinja chat template instead of the model's own format: a file, or 'auto' for the"
        " checkpoint's",
        "chat",
        metavar="FILE",
    )
    host: str = _option("127.0.0.1", _text, "address to listen on", "server")
    port: int = _option(8000, _integer(0), "port to listen on; 0 picks a free one", "server")
    served_model_name: tuple[str, ...] = _option(
        (), _words, "name that clients ask for (repeatable)", "server", many=True, metavar="NAME"
    )
    api_key: tuple[str, ...] = _option(
        (), _words, "key that clients must send (repeatable)", "server", many=True, metavar="KEY"
    )
    queue: int = _option(
        256, _integer(1), "requests that may wait before clients get 503", "server", metavar="N"
    )
    cors_origins: tuple[str, ...] = _option(
        ("*",),
        _words,
        "origins whose pages may call (repeatable)",
        "server",
        many=True,
        metavar="ORIGIN",
    )
    max_body_mb: int = _option(
        32, _integer(1), "largest request body, in MiB", "server", metavar="N"
    )
    drain_seconds: int = _option(
        30, _integer(0), "time for running requests after SIGTERM", "server", metavar="N"
    )


@dataclass(frozen=True)
class Source:
    """Where a setting's value came from; shown in errors."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return VARIABLE_PREFIX + name.upper()


@dataclass(frozen=True)
class Layers:
    """The places that settings come from, strongest first, each already read."""

    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    dotenv: Mapping[str, str]
    config: Mapping[str, Any]
    config_name: str = CONFIG_NAME

    @classmethod
    def read(
        cls,
        flags: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        config: Path | None = None,
    ) -> Layers:
        """Reads ``.env`` and the configuration file (by default ``folder/megakernel.toml``).

        Raises:
            SettingsError: the named file is missing, is not TOML, or has an unknown key.
        """
        try:
            found = dotenv_values(folder / ".env", interpolate=False)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read .env: {error}") from None
        dotenv = {name: value for name, value in found.items() if value is not None}
        named = config or environment.get("MEGAKERNEL_CONFIG") or dotenv.get("MEGAKERNEL_CONFIG")
        path = Path(named) if named else folder / CONFIG_NAME
        values = _read_toml(path) if named or path.exists() else {}
        return cls(flags, environment, dotenv, values, str(path))

    def find_variable(self, name: str) -> tuple[str, Source] | None:
        """An environment variable, from the environment or from ``.env``; empty counts as unset."""
        if value := self.environment.get(name):
            return value, Source("environment", name)
        if value := self.dotenv.get(name):
            return value, Source("dotenv", f"{name} in .env")
        return None

    def find(self, name: str) -> tuple[Any, Source] | None:
        """The raw value of a setting from the strongest place that has it."""
        if name in self.flags:
            return self.flags[name], Source("flag", flag(name))
        if (found := self.find_variable(variable(name))) is not None:
            return found
        if name in self.config:
            return self.config[name], Source("config", f"{name} in {self.config_name}")
        return None

    def resolve(self) -> Settings:
        """The settings.

        Raises:
            SettingsError: a value is not legal.
        """
        values: dict[str, Any] = {}
        for option in fields(Settings):
            if (found := self.find(option.name)) is not None:
                values[option.name] = parse(option, *found)
        return Settings(**values)


def parse(option: Field[Any], raw: Any, source: Source) -> Any:
    """Brings a raw value (text, or what TOML holds) to the setting's type."""
    meta = option.metadata
    try:
        if isinstance(raw, list | tuple) and meta.get("many"):
            return tuple(word for text in raw for word in meta["parse"](_plain(text)))
        value = meta["parse"](_plain(raw))
    except ValueError:
        wanted = meta["parse"].__name__
        raise SettingsError(f"{source} must be a {wanted}, not {raw!r}") from None
    if "choices" in meta and value not in meta["choices"]:
        legal = ", ".join(meta["choices"])
        raise SettingsError(f"{source} must be one of {legal}, not {raw!r}")
    return value


def options(groups: Sequence[str]) -> list[Field[Any]]:
    """The settings of some groups, in the table's order."""
    return [option for option in fields(Settings) if option.metadata["group"] in groups]


def default_of(option: Field[Any]) -> Any:
    """The default to show in help texts; None if there is nothing to show."""
    return None if option.default in (None, (), MISSING) else option.default


def _plain(value: Any) -> str:
    if not isinstance(value, str | int | float):
        raise ValueError
    return str(value)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    known = {option.name for option in fields(Settings)}
    values = {name.replace("-", "_"): value for name, value in values.items()}
    if unknown := sorted(set(values) - known):
        raise SettingsError(f"{path} has an unknown key {unknown[0]!r}")
    return values
