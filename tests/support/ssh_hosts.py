"""SSH hosts as tests start them."""

from __future__ import annotations

from pathlib import Path

from skyward.testing.hosts import SshHost, share_cache


def bare_host(folder: Path, address: str, cache: Path) -> SshHost:
    """Return a host, not started, that has Python and pip's settings, and builds its environments itself."""
    return SshHost(folder, address=address, env={"PIP_CONFIG_FILE": str(cache / "pip.conf")})


def cached_host(folder: Path, address: str, cache: Path) -> SshHost:
    """Return a host, not started, that shares uv, environments and packages with other tests' hosts."""
    host = bare_host(folder, address, cache)
    share_cache(host.home, cache)
    return host
