"""Tables of refusals, as three kinds of API need them."""

from __future__ import annotations

import pytest

from skyward.errors import ConfigurationError
from skyward.providers import digitalocean, runpod, vastai, verda
from skyward.providers._common.refusals import (
    ERRORS,
    RefusalKind,
    RefusalRow,
    RefusalTable,
    RefusedCall,
    is_kind,
)

TABLE = RefusalTable(
    rows=(
        RefusalRow(kind=RefusalKind.CAPACITY, codes="unprocessable", words=r"not available in|sold out"),
        RefusalRow(kind=RefusalKind.QUOTA, words="will exceed your .* limit", advice="Raise it in {place}"),
        RefusalRow(kind=RefusalKind.RATE, codes="slow_down Throttl*"),
        RefusalRow(kind=RefusalKind.MISSING, codes="forbidden", words="no such", status=403),
    ),
    advice={RefusalKind.AUTH: "Make a token with the scope {scope}"},
)


@pytest.mark.parametrize(
    ("code", "message", "status", "kind"),
    [
        ("unprocessable", "Size is NOT available in nyc1", 422, RefusalKind.CAPACITY),
        ("unprocessable", "name is too long", 422, RefusalKind.BAD_REQUEST),
        ("other", "sold out", 422, RefusalKind.BAD_REQUEST),
        ("anything", "this will exceed your machine limit", 422, RefusalKind.QUOTA),
        ("ThrottledSomehow", "", 400, RefusalKind.RATE),
        ("forbidden", "no such machine", 403, RefusalKind.MISSING),
        ("forbidden", "no such machine", 401, RefusalKind.AUTH),
        ("", "", 401, RefusalKind.AUTH),
        ("", "", 402, RefusalKind.QUOTA),
        ("", "", 403, RefusalKind.AUTH),
        ("", "", 404, RefusalKind.MISSING),
        ("", "", 408, RefusalKind.TRANSIENT),
        ("", "", 409, RefusalKind.IN_USE),
        ("", "", 429, RefusalKind.RATE),
        ("", "", 502, RefusalKind.TRANSIENT),
        ("", "", 599, RefusalKind.TRANSIENT),
        ("", "", 418, RefusalKind.BAD_REQUEST),
    ],
)
def test_the_first_row_that_fits_counts_and_else_the_status(
    code: str, message: str, status: int, kind: RefusalKind
) -> None:
    assert TABLE.judge(code, message, status=status).kind is kind


WORDS = (
    "is not available, not your own, out of stock, capacity, does not exist, credit, exceed your limit, invalid size"
)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
@pytest.mark.parametrize("table", [digitalocean.REFUSED, runpod.TABLE, vastai.TABLE, verda.TABLE])
def test_an_error_of_the_vendors_server_is_no_refusal_whatever_its_words(table: RefusalTable, status: int) -> None:
    """The call may have taken effect: a machine that is taken for refused would be left."""
    assert table.judge(f"HTTP {status}", f"the service {WORDS}", status=status).kind is RefusalKind.TRANSIENT


def test_the_advice_is_the_rows_else_the_tables_else_the_usual() -> None:
    def told(code: str, message: str, status: int) -> str:
        words = {"place": "the console", "scope": "vm:read"}
        found = TABLE.judge(code, message, status=status)
        return str(TABLE.explain(found, "cloud eu-1: POST /machines", **words))

    assert told("x", "It will exceed your VM limit.", 422) == (
        "cloud eu-1: POST /machines was refused: x: It will exceed your VM limit. Raise it in the console"
    )
    assert told("x", "no {braces}", 401).endswith("no {braces}. Make a token with the scope vm:read")
    assert told("x", "y", 429).endswith("wait some minutes, or run fewer pools at once")


def test_every_kind_has_an_error_and_advice() -> None:
    assert set(ERRORS) == set(RefusalKind)
    for kind in RefusalKind:
        table = RefusalTable(rows=[RefusalRow(kind=kind, codes="x")])
        error = table.explain(table.judge("x", "y"), "here")
        assert type(error) is ERRORS[kind]
        assert len(str(error)) > len("here was refused: x: y. ") + 20


def test_codes_whose_meaning_hangs_on_the_message_are_in_no_list_of_codes() -> None:
    assert TABLE.codes == {"slow_down": RefusalKind.RATE, "Throttl*": RefusalKind.RATE}


def test_a_caller_can_tell_kinds_apart_by_the_error_or_its_cause() -> None:
    cause = RefusedCall(TABLE.judge("", "", status=404))
    error = ConfigurationError("explained")
    error.__cause__ = cause

    assert is_kind(cause, RefusalKind.MISSING)
    assert is_kind(error, RefusalKind.AUTH, RefusalKind.MISSING)
    assert not is_kind(error, RefusalKind.AUTH)
    assert not is_kind(ConfigurationError("ours"), *RefusalKind)
