"""What AWS and botocore say, and what the caller gets."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from botocore import exceptions
from botocore.exceptions import BotoCoreError, ClientError

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    RateLimitError,
    SkywardError,
    UnreachableError,
)
from skyward.providers._common.refusals import ERRORS, RefusalKind
from skyward.providers.aws.api import CODES, Where, convert_errors, explained, meanings, refusal

WHERE = Where(region="eu-west-1", service="ec2", operation="RunInstances")
OWN = {kind for kind in vars(exceptions).values() if inspect.isclass(kind) and issubclass(kind, BotoCoreError)}


def answered(code: str, message: str = "said so", status: int = 400) -> ClientError:
    said: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(said, "RunInstances")


WRONG_REQUESTS = """
    DataNotFoundError UnknownRegionError ApiVersionNotFoundError InvalidIMDSEndpointError
    InvalidIMDSEndpointModeError UnknownSignatureVersionError ServiceNotInRegionError
    BaseEndpointResolverError ProfileNotFound ConfigParseError ConfigNotFound InfiniteLoopConfigError
    MissingParametersError ValidationError ParamValidationError UnknownServiceStyle PaginationError
    OperationNotPageableError UnseekableStreamError InvalidExpressionError WaiterConfigError
    UnknownClientMethodError UnsupportedSignatureVersionError InvalidDNSNameError
    InvalidS3AddressingStyleError UnsupportedS3ArnError UnsupportedS3ControlArnError InvalidHostLabelError
    UnsupportedOutpostResourceError UnsupportedS3ConfigurationError UnsupportedS3AccesspointConfigurationError
    InvalidEndpointDiscoveryConfigurationError UnsupportedS3ControlConfigurationError
    InvalidRetryConfigurationError InvalidS3UsEast1RegionalEndpointConfigError
    InvalidSTSRegionalEndpointsConfigError StubResponseError InvalidConfigError MD5UnavailableError
    MissingDependencyException InvalidProxiesConfigError InvalidDefaultsMode InvalidEndpointConfigurationError
    EndpointProviderError InvalidChecksumConfigError UnsupportedServiceProtocolsError
"""
"""Exceptions, with those derived from them, that no repetition and no other credentials would help."""


def test_everything_that_botocore_raises_has_a_meaning(subtests: pytest.Subtests) -> None:
    for kind in sorted(OWN - {BotoCoreError}, key=lambda kind: kind.__name__):
        with subtests.test(kind=kind):
            bases = [base for base in kind.__mro__ if base in meanings()]
            known = bases[0] is not BotoCoreError or any(
                base.__name__ in WRONG_REQUESTS.split() for base in kind.__mro__
            )
            assert known, f"{kind.__name__} is new: say what it means"


def test_no_meaning_is_of_a_wrong_request_besides_the_default() -> None:
    assert [kind for kind, meaning in meanings().items() if meaning is RefusalKind.BAD_REQUEST] == [BotoCoreError]
    for name in WRONG_REQUESTS.split():
        bases = getattr(exceptions, name, BotoCoreError).__mro__
        assert [base for base in bases if base in meanings()] == [BotoCoreError], name


def test_an_answer_is_an_error_of_skyward(subtests: pytest.Subtests) -> None:
    for code, status, error in [
        ("UnauthorizedOperation", 403, AuthenticationError),
        ("AccessDeniedException", 400, AuthenticationError),
        ("ExpiredToken", 400, AuthenticationError),
        ("VcpuLimitExceeded", 400, QuotaError),
        ("MaxSpotInstanceCountExceeded", 400, QuotaError),
        ("InsufficientInstanceCapacity", 500, CapacityError),
        ("Unsupported", 400, CapacityError),
        ("SpotMaxPriceTooLow", 400, CapacityError),
        ("RequestLimitExceeded", 503, RateLimitError),
        ("ThrottlingSomehow", 400, RateLimitError),
        ("Unheard", 429, RateLimitError),
        ("InternalError", 500, UnreachableError),
        ("Unheard", 502, UnreachableError),
        ("InvalidParameterCombination", 400, ConfigurationError),
        ("InvalidParameterValue", 400, ConfigurationError),
    ]:
        with subtests.test(code=code, status=status, error=error):
            told = explained(answered(code, status=status), WHERE)

            assert type(told) is error
            assert str(told).startswith(f"aws eu-west-1: ec2 RunInstances was refused: {code}: said so. ")


def test_every_message_says_what_to_do_next(subtests: pytest.Subtests) -> None:
    for code in CODES:
        with subtests.test(code=code):
            told = explained(answered(code), WHERE)

            assert type(told) is ERRORS[CODES[code]]
            said, _, advice = str(told).partition("said so. ")
            assert said
            assert len(advice) > 30
            assert "{" not in advice


def test_a_missing_role_is_told_from_other_wrong_values_by_the_message() -> None:
    told = refusal(
        answered(
            "InvalidParameterValue",
            "Value (x) for parameter iamInstanceProfile.name is invalid. Invalid IAM Instance Profile name",
        )
    )
    assert told is not None
    assert told.kind is RefusalKind.MISSING


@pytest.mark.parametrize(
    ("error", "kind", "part"),
    [
        (exceptions.NoCredentialsError(), AuthenticationError, "aws configure"),
        (exceptions.PartialCredentialsError(provider="env", cred_var="x"), AuthenticationError, "Set both"),
        (exceptions.ProfileNotFound(profile="nobody"), ConfigurationError, "list-profiles"),
        (
            exceptions.TokenRetrievalError(provider="sso", error_msg="x"),
            AuthenticationError,
            "aws sso login --profile p",
        ),
        (exceptions.SSOTokenLoadError(error_msg="x"), AuthenticationError, "aws sso login --profile p"),
        (exceptions.UnauthorizedSSOTokenError(), AuthenticationError, "aws sso login --profile p"),
        (exceptions.EndpointConnectionError(endpoint_url="x"), UnreachableError, "network"),
        (exceptions.ConnectTimeoutError(endpoint_url="x"), UnreachableError, "network"),
        (exceptions.ReadTimeoutError(endpoint_url="x"), UnreachableError, "network"),
        (exceptions.ConnectionClosedError(endpoint_url="x"), UnreachableError, "network"),
        (exceptions.NoRegionError(), ConfigurationError, "Correct"),
    ],
)
def test_what_botocore_raises_is_an_error_of_skyward(error: Exception, kind: type[SkywardError], part: str) -> None:
    told = explained(error, Where(region="eu-west-1", service="ec2", operation="RunInstances", profile="p"))

    assert type(told) is kind
    assert part in str(told)


def test_what_is_neither_aws_s_nor_botocore_s_stays_what_it_is() -> None:
    assert explained(ValueError("a fault of ours"), WHERE) is None


def test_a_page_of_a_proxy_is_an_interruption() -> None:
    from botocore.parsers import ResponseParserError

    error = ResponseParserError("Unable to parse response: invalid XML received: b'<!doctype html>'")
    assert isinstance(explained(error, WHERE), UnreachableError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(exceptions.ReadTimeoutError(endpoint_url="x"), UnreachableError), (FileNotFoundError("disk"), FileNotFoundError)],
)
def test_timeouts_of_botocore_are_converted_although_they_are_os_errors(error: OSError, kind: type[Exception]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(kind):
        convert_errors(WHERE, fail)
