"""Texts and URLs without credentials."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

__all__ = ["bare_url", "without_credentials"]

_USER = re.compile(r"(?<=://)[^/\s]+@")  # a password may hold an @ itself
_PARAMETER = re.compile(
    r"""([?&;][\w.-]*(?:token|key|secret|password|passwd|signature|credential|sig|auth)[\w.-]*=)[^&;#\s'"]+""",
    re.ASCII | re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Return ``text`` with ``***`` for the user in each URL, and for query parameters with names of secrets."""
    return _PARAMETER.sub(r"\1***", _USER.sub("***@", text))


_TOKEN = re.compile(r"(?<=/)(?=[^/]*[a-z])(?=[^/]*[A-Z])(?=[^/]*\d)[\w-]{16,}(?=/)", re.ASCII)
"""Part of a path that no one would choose as a name, such as a token of Cloudsmith or Gemfury."""


def bare_url(url: str) -> str:
    """Return a URL without anything that may be a secret: user, query, fragment, and tokens in its path.

    The user of SSH stays if it has no password: ``ssh://git@host``.
    """
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    keeps_user = parts.scheme.endswith("ssh") and ":" not in user
    path = _TOKEN.sub("***", parts.path)
    return parts._replace(netloc=parts.netloc if keeps_user else host, path=path, query="", fragment="").geturl()
