"""Texts for people to read, without the credentials in their URLs."""

from __future__ import annotations

import re

__all__ = ["without_credentials"]

_USER = re.compile(r"(?<=://)[^/\s]+@")  # a password may hold an @ itself
_PARAMETER = re.compile(
    r"""([?&;][\w.-]*(?:token|key|secret|password|passwd|signature|credential|sig|auth)[\w.-]*=)[^&;#\s'"]+""",
    re.ASCII | re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Return ``text`` with ``***`` for the user in each URL, and for query parameters with names of secrets."""
    return _PARAMETER.sub(r"\1***", _USER.sub("***@", text))
