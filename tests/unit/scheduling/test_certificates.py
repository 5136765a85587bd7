"""How long a pool's certificate is valid."""

from __future__ import annotations

import datetime as dt

import pytest
from cryptography import x509

from skyward.scheduling.certificates import issue

DAY_S = 24 * 3600.0


@pytest.mark.parametrize("timeout_s", [0.0, 3600.0, 30 * DAY_S, 90 * DAY_S, 20 * 365 * DAY_S])
def test_a_certificate_outlives_every_node_and_its_replacements(timeout_s: float) -> None:
    certificate = x509.load_pem_x509_certificate(issue(timeout_s).cert.encode())

    left = certificate.not_valid_after_utc - dt.datetime.now(dt.UTC)
    assert left >= dt.timedelta(seconds=timeout_s, days=365)


def test_a_certificate_is_valid_where_the_clock_is_behind_by_hours() -> None:
    certificate = x509.load_pem_x509_certificate(issue(3600.0).cert.encode())

    assert dt.datetime.now(dt.UTC) - certificate.not_valid_before_utc >= dt.timedelta(hours=23)


def test_a_timeout_that_never_comes_is_no_error() -> None:
    certificate = x509.load_pem_x509_certificate(issue(1e30).cert.encode())

    assert certificate.not_valid_after_utc.year >= 2100
