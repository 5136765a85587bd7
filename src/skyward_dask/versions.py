"""Whether this process and a pool's nodes can work together: pickles of one must load in the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyward.errors import ConfigurationError

__all__ = ["check_versions"]

_SAME = ("dask", "distributed", "cloudpickle")


def check_versions(versions: Mapping[str, Any]) -> None:
    """Refuse a client whose Python, dask, distributed or cloudpickle are not those of the nodes.

    Of Python only the minor version counts.

    Args:
        versions: what :meth:`distributed.Client.get_versions` returns: the versions of the client, the scheduler and
            the workers.

    Raises:
        ConfigurationError: they differ; names both sides, and what to do.
    """
    here = _relevant(versions["client"])
    there = {"the scheduler": versions["scheduler"], **versions["workers"]}
    for where, told in there.items():
        found = _relevant(told)
        if different := [name for name in here if here[name] != found[name]]:
            mine = ", ".join(f"{name} {here[name]}" for name in different)
            theirs = ", ".join(f"{name} {found[name]}" for name in different)
            raise ConfigurationError(
                f"this process has {mine}, but {where} has {theirs}: what one of them pickles, the other cannot be "
                f"trusted to load. {_remedy(different, here)}"
            )


def _remedy(different: list[str], here: Mapping[str, str]) -> str:
    if "python" in different:
        return f"Run this process with the nodes' Python, or ask for nodes with yours: Image(python={here['python']!r})"
    pins = ", ".join(f'"{name}=={here[name]}"' for name in different)
    return f"Install the nodes' versions here, or yours there: pip=[{pins}]"


def _relevant(told: Mapping[str, Any]) -> dict[str, str]:
    packages: Mapping[str, str | None] = told["packages"]
    python = ".".join((packages.get("python") or "unknown").split(".")[:2])
    return {"python": python, **{name: packages.get(name) or "missing" for name in _SAME}}
