"""The parser: one flag per setting, one command per task and per installed model family."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from kda_mla_kernels.model import packages

from megakernel_serve import __version__
from megakernel_serve.settings import Option, flag, options

__all__ = ["COMMANDS", "build_parser"]

EPILOG = """\
Every flag can also be set as a variable (--max-tokens: MEGAKERNEL_MAX_TOKENS), in .env, or in
megakernel.toml (max_tokens = 100). The strongest is the flag, then the environment, .env, the file.
"""

COMMANDS = {
    "generate": ("continue a text", ("model", "sampling")),
    "chat": ("talk to a model in the terminal", ("model", "sampling", "chat", "terminal")),
    "serve": ("answer OpenAI-compatible requests", ("model", "sampling", "chat", "server")),
    "info": ("show what a model is and needs", ("model",)),
}
ALL_GROUPS = ("model", "sampling", "chat", "terminal", "server")


def build_parser() -> argparse.ArgumentParser:
    """The whole parser; model packages are listed by name, not imported."""
    parser = argparse.ArgumentParser(
        prog="megakernel",
        description="Run and serve language models.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megakernel-serve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, groups) in COMMANDS.items():
        command = _command(commands, name, summary, groups)
        if name == "generate":
            command.add_argument(
                "prompt", nargs="?", metavar="PROMPT", help="default: standard input, if piped"
            )
        if name == "info":
            command.add_argument(
                "checkpoint", nargs="?", metavar="MODEL", help="the same as --model"
            )
    for family in sorted(set(packages()) - set(COMMANDS)):
        command = _command(
            commands, family, f"chat with the {family} family's main checkpoint", ALL_GROUPS
        )
        command.add_argument(
            "--serve", metavar="HOST:PORT", help="serve it instead of chatting in the terminal"
        )
    return parser


def _command(commands: Any, name: str, summary: str, groups: Sequence[str]) -> Any:
    command = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    command.add_argument("--config", metavar="FILE", help="configuration file (megakernel.toml)")
    command.add_argument("--debug", action="store_true", help="show tracebacks and debug messages")
    for option in options(groups):
        if groups is not ALL_GROUPS or option.name not in ("host", "port"):  # --serve has them
            _add_flag(command, option)
    return command


def _add_flag(command: argparse.ArgumentParser, option: Option) -> None:
    names, text = [flag(option.name)], option.help
    if option.name == "model":
        names.append("--checkpoint")
    if (default := option.shown_default) is not None:
        shown = ",".join(default) if isinstance(default, tuple) else default
        text += f" (default: {shown})"
    extra: dict[str, Any] = {"help": text, "dest": option.name}
    if option.kind.is_switch:
        extra["action"] = argparse.BooleanOptionalAction
    elif option.kind.is_list:
        extra |= {"action": "append", "metavar": option.metavar}
    elif option.kind.choices:
        extra["choices"] = option.kind.choices
    else:
        extra["metavar"] = option.metavar
    command.add_argument(*names, **extra)
