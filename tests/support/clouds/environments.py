"""Environments for hosts that reach no package index: built on a host of this machine's network, in a shared cache."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import skyward as sky
from skyward.environment.bootstrap import bootstrap
from skyward.machine.ssh import SshTransport
from skyward.request.request import parse_request
from skyward.testing.hosts import SshHost, share_cache

__all__ = ["build_environment"]

_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"


def build_environment(image: sky.Image, cache: Path, folder: Path) -> None:
    """Build the environment of an image in ``cache``, unless it is there; ``folder`` is a new one, for the host."""
    parsed = parse_request(image=image).image

    async def build(host: SshHost) -> None:
        transport = SshTransport(host.target())
        try:
            place = str(host.home / ".cache/skyward")
            await bootstrap(parsed, transport, cache=place, node=0, progress=lambda _step: None)
        finally:
            await transport.close()

    # After the machine's own programs, the Python of this release, which containers see too.
    path = f"{_PATH}:{sys.base_prefix}/bin"
    with SshHost(folder, address="127.0.2.2", path=path, env={"PIP_CONFIG_FILE": str(cache / "pip.conf")}) as host:
        share_cache(host.home, cache)
        asyncio.run(build(host))
