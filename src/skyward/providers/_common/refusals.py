"""Refusals of a vendor's API: their class, Skyward's error and its advice, as one table; findings of checks."""

from __future__ import annotations

import enum
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    RateLimitError,
    SkywardError,
    UnreachableError,
)
from skyward.providers.base import Finding


class RefusalKind(enum.Enum):
    """Class of refusals, by the caller's next step."""

    AUTH = "auth"
    """The credentials are invalid or do not permit the call. Fatal."""
    QUOTA = "quota"
    """The account's limit is reached. Fatal for this type."""
    CAPACITY = "capacity"
    """No capacity now: another type or zone may have some."""
    RATE = "rate"
    """Too many requests: retry later."""
    TRANSIENT = "transient"
    """The outcome is unknown: retry, if the call may be made twice."""
    MISSING = "missing"
    """The resource does not exist: not yet, right after its creation, or not any more."""
    EXISTS = "exists"
    """The resource exists already; no error where it is only to be ensured."""
    IN_USE = "in use"
    """The resource is still in use: retry later."""
    BAD_REQUEST = "bad request"
    """The request itself is wrong. Fatal."""


ERRORS: Final[Mapping[RefusalKind, type[SkywardError]]] = {
    RefusalKind.AUTH: AuthenticationError,
    RefusalKind.QUOTA: QuotaError,
    RefusalKind.CAPACITY: CapacityError,
    RefusalKind.RATE: RateLimitError,
    RefusalKind.TRANSIENT: UnreachableError,
    RefusalKind.MISSING: UnreachableError,
    RefusalKind.EXISTS: ConfigurationError,
    RefusalKind.IN_USE: UnreachableError,
    RefusalKind.BAD_REQUEST: ConfigurationError,
}
"""Error raised to the caller."""

_ADVICE: Final[Mapping[RefusalKind, str]] = {
    RefusalKind.AUTH: "Check the credentials and their permissions",
    RefusalKind.QUOTA: "See the account's limits, and request higher ones",
    RefusalKind.CAPACITY: "Another machine type, region or spot strategy may have some",
    RefusalKind.RATE: "It was retried and refused each time; wait some minutes, or run fewer pools at once",
    RefusalKind.TRANSIENT: "Check this machine's network, then the provider's status page",
    RefusalKind.MISSING: "It may have been deleted from outside Skyward; try again",
    RefusalKind.EXISTS: "Something else of that name exists; remove it",
    RefusalKind.IN_USE: "It is still in use; delete it later",
    RefusalKind.BAD_REQUEST: "Correct the request; if Skyward made it up, please report this",
}
_BY_STATUS: Final[Mapping[int, RefusalKind]] = {
    401: RefusalKind.AUTH,
    402: RefusalKind.QUOTA,
    403: RefusalKind.AUTH,
    404: RefusalKind.MISSING,
    408: RefusalKind.TRANSIENT,
    409: RefusalKind.IN_USE,
    410: RefusalKind.MISSING,
    429: RefusalKind.RATE,
}
_HTTP_SERVER_ERROR: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Classified error of an API.

    Attributes:
        kind: its class.
        code: the vendor's error code, or the name of an exception of its library.
        message: the vendor's text.
        advice: next step for exactly this error; empty for that of its class.
        unsent: True if no connection came about: the request certainly had no effect.
    """

    kind: RefusalKind
    code: str
    message: str
    advice: str = ""
    unsent: bool = False


class RefusedCall(Exception):
    """Cause of an error of Skyward's: the refusal that it explains.

    Attributes:
        refusal: the classified error.
    """

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(f"{refusal.code}: {refusal.message}")
        self.refusal = refusal


def is_kind(error: BaseException, *kinds: RefusalKind) -> bool:
    """Return whether ``error``, or its cause, is a :class:`RefusedCall` of one of these kinds."""
    refusal = _refusal_of(error)
    return refusal is not None and refusal.kind in kinds


def is_unsent(error: BaseException) -> bool:
    """Return whether ``error`` is that of a request that was never sent: it certainly had no effect."""
    refusal = _refusal_of(error)
    return refusal is not None and refusal.unsent


def _refusal_of(error: BaseException) -> Refusal | None:
    cause = error if isinstance(error, RefusedCall) else error.__cause__
    return cause.refusal if isinstance(cause, RefusedCall) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalRow:
    """Errors with the same class and advice. An error belongs here if it matches every condition that is given.

    An error of the vendor's server, with a status from 500 on, belongs here only by its code or its status: after words
    such as "not available" the call may still have taken effect.

    Attributes:
        kind: their class.
        codes: the vendor's codes, separated by blanks; ``*`` stands for any characters. Empty for any code.
        words: regular expression found in the message, in upper or lower case. Empty for any message.
        status: HTTP status; 0 for any.
        advice: next step; empty for that of the class. Names in braces are replaced by :meth:`RefusalTable.explain`.
    """

    kind: RefusalKind
    codes: str = ""
    words: str = ""
    status: int = 0
    advice: str = ""

    def matches(self, code: str, message: str, status: int) -> bool:
        """Return whether an error belongs to this row."""
        return (
            (not self.codes or any(fnmatchcase(code, each) for each in self.codes.split()))
            and (not self.words or re.search(self.words, message, re.IGNORECASE) is not None)
            and self.status in (0, status)
            and (status < _HTTP_SERVER_ERROR or bool(self.codes or self.status))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusalTable:
    """Errors of one API. The first row that matches counts; without one, the HTTP status does.

    Attributes:
        rows: the rows, the particular ones first.
        advice: next steps by class, where the general ones do not suffice.
    """

    rows: Sequence[RefusalRow]
    advice: Mapping[RefusalKind, str] = field(default_factory=dict[RefusalKind, str])

    @property
    def codes(self) -> Mapping[str, RefusalKind]:
        """Class of each code that is classified without its message."""
        return {code: row.kind for row in self.rows if not row.words for code in row.codes.split()}

    def judge(self, code: str, message: str, *, status: int = 0) -> Refusal:
        """Classify an error; ``status`` is the HTTP status of the answer, 0 for none."""
        row = next((each for each in self.rows if each.matches(code, message, status)), None)
        if row is not None:
            return Refusal(kind=row.kind, code=code, message=message, advice=row.advice)
        other = RefusalKind.TRANSIENT if status >= _HTTP_SERVER_ERROR else RefusalKind.BAD_REQUEST
        return Refusal(kind=_BY_STATUS.get(status, other), code=code, message=message)

    def explain(self, found: Refusal, where: str, **words: str) -> SkywardError:
        """Return the error for a refusal: call, place, code, message, next step.

        Args:
            found: the refusal.
            where: provider, place and call, such as ``"cloud eu-1: POST /machines"``.
            **words: replacements for the names in braces of the advice.
        """
        advice = (found.advice or {**_ADVICE, **self.advice}[found.kind]).format(**words)
        return ERRORS[found.kind](f"{where} was refused: {found.code}: {found.message.rstrip('.')}. {advice}")

    def refused(self, code: str, message: str, where: str, *, status: int = 0) -> SkywardError:
        """Return the error for a refusal that is part of an answer of success; see :meth:`judge`, :meth:`explain`."""
        found = self.judge(code, message, status=status)
        error = self.explain(found, where)
        error.__cause__ = RefusedCall(found)
        return error


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
