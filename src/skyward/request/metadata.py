"""Where a machine is told that it will be taken back: what a provider says, and a node watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["PreemptionWatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionWatch:
    """A metadata service that answers 404 until there is news.

    Attributes:
        endpoint: its address, ``"http://host:port"``.
        endpoint_env: variable of the machine's environment that overrides it, where it is set.
        token_path: where a token is had with PUT, which every other request carries; empty if none is needed.
        token_request_headers: headers of that request.
        token_header: the header that carries the token.
        notice_path: answers with JSON once the machine will be taken back.
        notice_time_field: member of that answer: when, ISO 8601 in UTC.
        hint_path: answers once that has become more likely than usual; empty if there is no such thing.
        interval_s: seconds between two looks.
    """

    endpoint: str
    notice_path: str
    notice_time_field: str
    endpoint_env: str = ""
    token_path: str = ""
    token_request_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    token_header: str = ""
    hint_path: str = ""
    interval_s: float = 5.0
