"""The places that settings come from, and which one wins.

A setting comes from the first of these that names it: flag, environment variable, ``.env`` in the
working directory, configuration file, default. The flag of ``max_tokens`` is ``--max-tokens``, its
variable ``MEGAKERNEL_MAX_TOKENS``, its key in the configuration file ``max_tokens``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from megakernel_serve.settings.table import Option, Settings, all_options

__all__ = ["CONFIG_NAME", "Layers", "SettingsError", "flag", "variable"]

CONFIG_NAME = "megakernel.toml"
VARIABLE_PREFIX = "MEGAKERNEL_"
CONFIG_VARIABLE = "MEGAKERNEL_CONFIG"


class SettingsError(ValueError):
    """A setting has a value that it cannot have; the message says where it came from."""


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
            SettingsError: the named file is missing, is not TOML, or has an unknown key; or
                ``.env`` is no text or holds what no environment can.
        """
        try:
            found = dotenv_values(folder / ".env", interpolate=False)
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"cannot read .env: {error}") from None
        dotenv = {name: value for name, value in found.items() if value is not None}
        for name, value in dotenv.items():
            if not name or "=" in name or "\0" in name + value:
                raise SettingsError(
                    f".env sets {name!r} to {value[:40]!r}, which no environment variable can be:"
                    " names have no '=', and nothing has NUL"
                )
        named = config or environment.get(CONFIG_VARIABLE) or dotenv.get(CONFIG_VARIABLE)
        path = Path(named) if named else folder / CONFIG_NAME
        values = _read_toml(path) if named or path.exists() else {}
        return cls(flags, environment, dotenv, values, str(path))

    def unknown_variables(self) -> list[tuple[str, str | None]]:
        """Places of variables that look like settings and are none, each with the closest name."""
        known = [variable(option.name) for option in all_options()] + [CONFIG_VARIABLE]
        names = {name: name for name in self.environment}
        names = {name: f"{name} in .env" for name in self.dotenv} | names
        return [
            (place, next(iter(get_close_matches(name, known, 1, 0.8)), None))
            for name, place in sorted(names.items())
            if name.startswith(VARIABLE_PREFIX) and name not in known
        ]

    def find_variable(self, name: str) -> tuple[str, str] | None:
        """A variable and its place, from the environment or ``.env``; empty counts as unset."""
        if value := self.environment.get(name):
            return value, name
        if value := self.dotenv.get(name):
            return value, f"{name} in .env"
        return None

    def find(self, name: str) -> tuple[Any, str] | None:
        """A setting's raw value and its place, from the strongest place that has it."""
        if name in self.flags:
            return self.flags[name], flag(name)
        if (found := self.find_variable(variable(name))) is not None:
            return found
        if name in self.config:
            return self.config[name], f"{name} in {self.config_name}"
        return None

    def resolve(self) -> Settings:
        """The settings.

        Raises:
            SettingsError: a value is not legal.
        """
        values: dict[str, Any] = {}
        for option in all_options():
            if (found := self.find(option.name)) is not None:
                values[option.name] = _parse(option, *found)
        return Settings(**values)


def _parse(option: Option, raw: Any, place: str) -> Any:
    """Brings a raw value (text, or what TOML holds) to the setting's type."""
    try:
        if isinstance(raw, list | tuple) and option.kind.is_list:
            return tuple(word for text in raw for word in option.kind.parse(_plain(text)))
        return option.kind.parse(_plain(raw))
    except ValueError:
        raise SettingsError(f"{place} must be {option.kind.wanted}, not {raw!r}") from None


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
    known = {option.name for option in all_options()}
    values = {name.replace("-", "_"): value for name, value in values.items()}
    if unknown := sorted(set(values) - known):
        raise SettingsError(f"{path} has an unknown key {unknown[0]!r}")
    return values
