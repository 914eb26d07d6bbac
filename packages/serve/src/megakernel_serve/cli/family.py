"""``megakernel FAMILY``: the family's main checkpoint, in the terminal or served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megakernel_serve.address import Address
from megakernel_serve.cli import chat, serve
from megakernel_serve.cli.main import UsageError
from megakernel_serve.settings import flag, options

if TYPE_CHECKING:
    from megakernel_serve.cli.main import Invocation

__all__ = ["run"]


def run(invocation: Invocation) -> int:
    """Runs the command."""
    where = invocation.arguments["serve"]
    _refuse_idle_flags(invocation, ("server",) if where is None else ("terminal",))
    if where is None:
        return chat.run(invocation)
    try:
        address = Address.parse(where)
    except ValueError as error:
        raise UsageError(f"--serve: {error}") from None
    return serve.run_at(invocation, address)


def _refuse_idle_flags(invocation: Invocation, groups: tuple[str, ...]) -> None:
    """A flag that would do nothing is a mistake of the one who typed it."""
    for option in options(groups):
        if option.name in invocation.layers.flags:
            needs = "needs" if "server" in groups else "does not go with"
            raise UsageError(f"{flag(option.name)} {needs} --serve")
