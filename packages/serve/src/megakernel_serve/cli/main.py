"""Entry point: arguments and settings first, then the command, then the exit code.

Exit codes: 0 success, 1 failure while running, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megakernel_serve.cli.arguments import COMMANDS, build_parser
from megakernel_serve.settings import Layers, Settings, SettingsError

__all__ = ["Invocation", "UsageError", "execute", "main"]

FAILURE, USAGE, INTERRUPTED = 1, 2, 130


class UsageError(ValueError):
    """The command line asks for something that makes no sense."""


@dataclass(frozen=True)
class Invocation:
    """A parsed command line."""

    command: str
    family: str | None
    settings: Settings
    layers: Layers
    arguments: dict[str, Any]
    """What is not a setting: ``prompt``, ``serve``."""
    debug: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command in a process of its own; the exit code."""
    code = execute(argv)
    if any(thread.name.startswith("megakernel-") for thread in threading.enumerate()):
        # A thread deep inside a compiler or a device call does not survive the interpreter's end.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(code)
    return code


def execute(argv: Sequence[str] | None = None) -> int:
    """Runs one command in this process; the exit code."""
    debug = False
    try:
        invocation = _invocation(argv)
        debug = invocation.debug
        _configure_logging(invocation)
        run = importlib.import_module(f"megakernel_serve.cli.{invocation.command}").run
        return run(invocation)
    except SystemExit as stop:  # argparse
        return stop.code if isinstance(stop.code, int) else USAGE
    except (SettingsError, UsageError) as error:
        return _complain(error, USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, which is its right
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except Exception as error:
        if debug:
            raise
        return _complain(error, FAILURE)


def _invocation(argv: Sequence[str] | None) -> Invocation:
    given = vars(build_parser().parse_args(argv))
    command = given.pop("command")
    debug = given.pop("debug", False)
    config = given.pop("config", None)
    if config is not None and not config.strip():
        raise UsageError("--config must name a configuration file, and is empty")
    arguments = {name: given.pop(name, None) for name in ("prompt", "serve")}
    if (checkpoint := given.pop("checkpoint", None)) is not None:
        if "model" in given:
            raise UsageError("give the model once: as MODEL or with --model")
        given["model"] = checkpoint
    layers = Layers.read(given, dict(os.environ), Path.cwd(), Path(config) if config else None)
    for place, close in layers.unknown_variables():
        hint = f"; did you mean {close}?" if close else ""
        _tell(f"warning: {place} is no setting of this program{hint}")
    for name, value in layers.dotenv.items():  # HF_HOME and the like, for the libraries below
        os.environ.setdefault(name, value)
    settings = layers.resolve()
    family = None if command in COMMANDS else command
    if family is None:
        _refuse_idle_revision(layers, settings)
    else:
        command = "family"
    return Invocation(command, family, settings, layers, arguments, debug)


def _refuse_idle_revision(layers: Layers, settings: Settings) -> None:
    """The checkpoint that is loaded without a name has no revisions."""
    if settings.model is None and (found := layers.find("revision")) is not None:
        raise UsageError(
            f"{found[1]} needs --model: it says which revision of a repository to take"
        )


def _configure_logging(invocation: Invocation) -> None:
    """A server logs its warnings; in the terminal the one error line says it all."""
    serves = invocation.command == "serve" or invocation.arguments["serve"] is not None
    level = logging.WARNING if serves else logging.CRITICAL
    logging.basicConfig(
        level=logging.DEBUG if invocation.debug else level,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )


def _complain(error: Exception, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    _tell(f"error: {text}")
    return code


def _tell(text: str) -> None:
    if sys.stderr is not None:  # print would then take standard output
        print(f"megakernel: {text}", file=sys.stderr)
