"""``megakernel FAMILY``: the family's main checkpoint, in the terminal or served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megakernel_serve.cli.main import UsageError

if TYPE_CHECKING:
    from megakernel_serve.cli.main import Invocation


def run(invocation: Invocation) -> int:
    """Runs the command."""
    where = invocation.arguments["serve"]
    if where is None:
        from megakernel_serve.cli import chat

        return chat.run(invocation)
    from megakernel_serve.cli import serve
    from megakernel_serve.server import Address

    try:
        address = Address.parse(where)
    except ValueError as error:
        raise UsageError(f"--serve: {error}") from None
    return serve.run_at(invocation, address)
