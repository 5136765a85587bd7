"""The metadata service in which a provider announces that it takes a machine back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["PreemptionWatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionWatch:
    """A metadata service that answers 404 until it has an announcement.

    Attributes:
        endpoint: its address, ``"http://host:port"``.
        endpoint_env: variable of the machine's environment that overrides it, where it is set.
        token_path: path at which PUT returns a token for every other request; empty if none is needed.
        token_request_headers: headers of that request.
        token_header: the header that carries the token.
        notice_path: path that answers with JSON once the machine will be taken back.
        notice_time_field: member of that answer with the time, ISO 8601 in UTC.
        hint_path: path that answers once preemption has become more likely; empty if there is none.
        interval_s: seconds between two requests.
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
