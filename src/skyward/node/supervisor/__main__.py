"""``python -m skyward.node.supervisor FOLDER``: the program of a node's supervisor."""

from __future__ import annotations

import socket
from typing import TextIO

from skyward.node.supervisor.program import run_program


def _supervise(configuration: str, answer: TextIO, zygote: tuple[int, socket.socket] | None) -> None:
    from skyward.node.supervisor.start import supervise  # meanwhile the zygote imports its own modules

    supervise(configuration, answer, zygote)


if __name__ == "__main__":
    run_program(_supervise)
