"""Check, at first contact, that a machine may end its own bill where its provider can refuse that."""

from __future__ import annotations

from typing import Final

from skyward.errors import UnreachableError
from skyward.provision.preparing.node_handle import NodeHandle

__all__ = ["refusal_of_end", "warning_of_bill"]

_TIMEOUT_S: Final = 120.0
_UNSURE: Final = "unsure: "
"""Start of the reason if the provider refused the check, and perhaps not the end."""
_LONGEST: Final = 300
"""Most characters of a machine's output in the warning."""


async def refusal_of_end(node: NodeHandle) -> str:
    """Run the machine's end check; return the reason for which it may not end its bill, empty if it may."""
    check = node.instance.end_check
    try:
        done = await node.transport.run(check, timeout_s=_TIMEOUT_S)
    except UnreachableError as error:
        return str(error)
    if not done.exit_code:
        return ""
    printed = " ".join((done.stdout + done.stderr).split())[:_LONGEST]
    return printed or f"{check[0]} ended with exit status {done.exit_code}"


def warning_of_bill(node: NodeHandle, reason: str) -> str:
    """Return the warning about a machine whose end check failed for ``reason``."""
    may = "may be unable to end" if reason.startswith(_UNSURE) else "cannot end"
    return (
        f"node {node.rank}: machine {node.instance.id} {may} its own bill ({reason}): its timeout and max_cost "
        "hold only while this program runs. It bills on if this program dies: the next pool's opening or "
        "`skyward sweep` removes it"
    )
