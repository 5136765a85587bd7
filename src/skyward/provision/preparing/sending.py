"""The files of ``Image(includes=)`` on their way to a node, whatever kind of machine it is."""

from __future__ import annotations

import asyncio

from skyward.errors import BootstrapError, ConfigurationError
from skyward.provision.preparing.commands import persist
from skyward.request.image import Image
from skyward.request.includes import included_files, pack_files
from skyward.transport.base import Completed, Transport

__all__ = ["deliver_includes"]

_TIMEOUT_S = 1800.0
_STEP = "skyward"
# What a release of Python lacks, it does not need: the archive is the client's own.
_UNPACK = """
import sys, tarfile
with tarfile.open(fileobj=sys.stdin.buffer, mode="r|gz") as archive:
    archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
    archive.extractall(sys.argv[1])
"""


async def deliver_includes(image: Image, transport: Transport, *, folder: str, python: str, node: int) -> None:
    """Put what the image includes into ``folder`` of the machine, with its interpreter ``python``. Idempotent.

    Raises :class:`~skyward.errors.BootstrapError`.
    """
    if not image.includes:
        return
    try:
        archive = await asyncio.to_thread(lambda: pack_files(included_files(image.includes)))
    except (ConfigurationError, OSError) as error:
        raise BootstrapError(
            f"the image's files cannot be sent to node {node}: {error}", node=node, step=_STEP
        ) from error

    async def unpack(left_s: float) -> Completed:
        return await transport.run([python, "-I", "-c", _UNPACK, folder], stdin=archive, timeout_s=left_s)

    done = await persist(unpack, deadline_s=_TIMEOUT_S, node=node, step=_STEP)
    if done.exit_code:
        tail = done.stderr.strip()
        raise BootstrapError(
            f"the image's files cannot be unpacked into {folder} of node {node} (exit code {done.exit_code}). "
            f"Check the space there\n{tail}",
            node=node,
            step=_STEP,
            log_tail=tail,
        )
