"""Findings of a provider's check of its own configuration, for ``skyward doctor``."""

from __future__ import annotations

from collections.abc import Awaitable

from skyward.errors import SkywardError
from skyward.providers.base import Finding

__all__ = ["failed", "finding"]


async def finding(what: str, look: Awaitable[str], *, fix: str = "") -> Finding:
    """Return the finding with the present value that ``look`` returns; a failed one if it raises Skyward's error.

    Args:
        what: name of the item.
        look: the check.
        fix: see :func:`failed`.
    """
    try:
        return Finding(what=what, state="ok", found=await look)
    except SkywardError as error:
        return failed(what, error, fix=fix)


def failed(what: str, error: SkywardError, *, fix: str = "") -> Finding:
    """Return a failed finding: the first sentence of the error is the cause, the rest the advice, else ``fix``."""
    found, stop, advice = str(error).partition(". ")
    return Finding(what=what, state="fail", found=found, fix=advice if stop else fix)
