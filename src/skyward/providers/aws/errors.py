"""Table of the errors of AWS and botocore, their meaning for the caller, and the advice in messages."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

from skyward.errors import (
    AuthenticationError,
    CapacityError,
    ConfigurationError,
    QuotaError,
    RateLimitError,
    SkywardError,
    UnreachableError,
)

__all__ = [
    "CODES",
    "ERRORS",
    "Refusal",
    "RefusalKind",
    "Where",
    "explain",
    "explained",
    "is_kind",
    "is_lost",
    "is_stale",
    "judge",
    "meanings",
    "refusal",
]


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
    """The outcome is unknown: retry with the same client token."""
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


def _kinds(**codes: str) -> dict[str, RefusalKind]:
    return {code: RefusalKind[kind] for kind, names in codes.items() for code in names.split()}


CODES: Final[Mapping[str, RefusalKind]] = _kinds(
    AUTH="""AuthFailure UnauthorizedOperation InvalidClientTokenId UnrecognizedClientException SignatureDoesNotMatch
        ExpiredToken ExpiredTokenException RequestExpired OptInRequired AccessDenied AccessDeniedException Blocked
        IncompleteSignature MissingAuthenticationToken MissingAuthenticationTokenException InvalidSignatureException
        NotAuthorized SubscriptionRequiredException""",
    QUOTA="""VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded VolumeLimitExceeded
        AddressLimitExceeded PendingVerification SecurityGroupLimitExceeded RulesPerSecurityGroupLimitExceeded
        MaxSpotFleetRequestCountExceeded InstanceCreditSpecification.NotSupported LaunchTemplateLimitExceeded""",
    CAPACITY="""InsufficientInstanceCapacity InsufficientCapacity UnfulfillableCapacity InsufficientHostCapacity
        InsufficientReservedInstanceCapacity InsufficientFleetCapacity SpotMaxPriceTooLow Unsupported
        InsufficientFreeAddressesInSubnet InsufficientVolumeCapacity Server.InsufficientInstanceCapacity""",
    RATE="""RequestLimitExceeded Throttling ThrottlingException ThrottledException EC2ThrottledException
        TooManyRequestsException RequestThrottled RequestThrottledException SlowDown BandwidthLimitExceeded
        PriorRequestNotComplete LimitExceededException""",
    TRANSIENT="""InternalError InternalFailure InternalServerError ServiceUnavailable Unavailable RequestTimeout
        RequestTimeoutException ServerInternal TransactionInProgressException ExpiredNextTokenException""",
    MISSING="""InvalidInstanceID.NotFound InvalidInstanceID.Malformed InvalidGroup.NotFound InvalidGroupId.Malformed
        InvalidKeyPair.NotFound InvalidLaunchTemplateId.NotFound InvalidLaunchTemplateName.NotFoundException
        InvalidLaunchTemplateId.Malformed InvalidSubnetID.NotFound InvalidSubnetID.Malformed InvalidVpcID.NotFound
        InvalidAMIID.NotFound InvalidAMIID.Malformed ParameterNotFound NoSuchResourceException TargetNotConnected
        InvalidSpotInstanceRequestID.NotFound InvalidSecurityGroupID.NotFound""",
    EXISTS="""InvalidGroup.Duplicate InvalidPermission.Duplicate InvalidKeyPair.Duplicate
        InvalidLaunchTemplateName.AlreadyExistsException""",
    IN_USE="DependencyViolation ResourceInUse IncorrectInstanceState IncorrectState InvalidGroup.InUse",
)
"""Error codes of EC2, Pricing, Service Quotas and Systems Manager. An unknown one is judged by its HTTP status."""

_FORBIDDEN: Final = (
    *("UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "NotAuthorized", "OptInRequired", "Blocked"),
    "SubscriptionRequiredException",
)
"""Codes for valid credentials without the permission."""

_UNSENT: Final = ("EndpointConnectionError", "ConnectTimeoutError")
"""Errors of calls that were never sent, for lack of a connection."""

_MESSAGES: Final[Mapping[tuple[str, str], RefusalKind]] = {
    ("InvalidParameterValue", "Invalid IAM Instance Profile"): RefusalKind.MISSING,
}
"""Codes whose meaning depends on the message."""

_HTTP_SERVER_ERROR = 500
_HTTP_TOO_MANY = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Call that was attempted, for messages.

    Attributes:
        region: region of the call.
        service: such as ``"ec2"``.
        operation: such as ``"RunInstances"``.
        profile: profile of the credentials; None means the usual ones.
    """

    region: str
    service: str
    operation: str
    profile: str | None = None

    def __str__(self) -> str:
        return f"aws {self.region}: {self.service} {self.operation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Classified error of AWS or botocore.

    Attributes:
        kind: its class.
        code: AWS's error code, or the name of botocore's exception.
        message: AWS's or botocore's text.
    """

    kind: RefusalKind
    code: str
    message: str


@cache
def meanings() -> Mapping[type[BaseException], RefusalKind]:
    """Return the class of each of botocore's own exceptions; the nearest base class counts.

    Raises:
        ConfigurationError: boto3 is not installed.
    """
    from botocore import exceptions

    names: Mapping[RefusalKind, str] = {
        RefusalKind.AUTH: """NoCredentialsError NoAuthTokenError TokenRetrievalError UnknownTokenProviderError
            PartialCredentialsError CredentialRetrievalError UnknownCredentialError SSOError LoginError
            RefreshWithMFAUnsupportedError InfiniteLoopConfigError""",
        RefusalKind.TRANSIENT: """HTTPClientError
            ConnectionError IncompleteReadError ChecksumError FlexibleChecksumError
            AwsChunkedWrapperError MetadataRetrievalError WaiterError""",
        RefusalKind.CAPACITY: "CapacityNotAvailableError",
        RefusalKind.BAD_REQUEST: """DataNotFoundError UnknownRegionError ApiVersionNotFoundError
            InvalidIMDSEndpointError InvalidIMDSEndpointModeError UnknownSignatureVersionError ServiceNotInRegionError
            BaseEndpointResolverError
            ProfileNotFound ConfigParseError ConfigNotFound MissingParametersError ValidationError ParamValidationError
            UnknownServiceStyle PaginationError OperationNotPageableError UnseekableStreamError InvalidExpressionError
            WaiterConfigError UnknownClientMethodError UnsupportedSignatureVersionError InvalidDNSNameError
            InvalidS3AddressingStyleError UnsupportedS3ArnError UnsupportedS3ControlArnError InvalidHostLabelError
            UnsupportedOutpostResourceError UnsupportedS3ConfigurationError UnsupportedS3AccesspointConfigurationError
            InvalidEndpointDiscoveryConfigurationError UnsupportedS3ControlConfigurationError
            InvalidRetryConfigurationError InvalidS3UsEast1RegionalEndpointConfigError
            InvalidSTSRegionalEndpointsConfigError StubResponseError InvalidConfigError MD5UnavailableError
            MissingDependencyException InvalidProxiesConfigError InvalidDefaultsMode InvalidEndpointConfigurationError
            EndpointProviderError InvalidChecksumConfigError UnsupportedServiceProtocolsError""",
    }
    # Older releases of botocore lack some of these exceptions.
    found = {name: kind for kind, listed in names.items() for name in listed.split() if hasattr(exceptions, name)}
    return {getattr(exceptions, name): kind for name, kind in found.items()}


def refusal(error: BaseException | None) -> Refusal | None:
    """Classify ``error``, or the answer that caused it; None if it is neither AWS's nor botocore's."""
    from botocore.exceptions import ClientError
    from botocore.parsers import ResponseParserError

    if isinstance(error, SkywardError):
        error = error.__cause__
    if error is None:
        return None
    if isinstance(error, ClientError):
        response = cast("Mapping[str, Any]", error.response)
        code, message = (str(response.get("Error", {}).get(name, "")) for name in ("Code", "Message"))
        return judge(code, message, status=int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)))
    # ResponseParserError is an answer of a proxy or gateway instead of AWS: the call may have taken effect.
    known = {**meanings(), ResponseParserError: RefusalKind.TRANSIENT}
    kind = next((known[base] for base in type(error).__mro__ if base in known), None)
    return None if kind is None else Refusal(kind=kind, code=type(error).__name__, message=str(error))


def is_kind(error: BaseException, *kinds: RefusalKind) -> bool:
    """Return whether ``error`` is a refusal of one of these kinds."""
    found = refusal(error)
    return found is not None and found.kind in kinds


def is_lost(error: BaseException) -> bool:
    """Return whether the failed call may have taken effect: it may have arrived, but its answer was lost.

    The error of a retried call has the error of the unanswered attempt as its cause, if there was one.
    """
    found = refusal(error)
    return found is None or (found.kind is RefusalKind.TRANSIENT and found.code not in _UNSENT)


def is_stale(error: BaseException) -> bool:
    """Return whether ``error`` is a refusal of invalid or expired credentials, which newer ones may replace."""
    found = refusal(error)
    return found is not None and found.kind is RefusalKind.AUTH and found.code not in _FORBIDDEN


def judge(code: str, message: str, *, status: int = 0) -> Refusal:
    """Classify an error code; ``status`` is the HTTP status of the answer, 0 for none."""
    return Refusal(kind=_kind(code, message, status), code=code, message=message)


def explained(error: BaseException, where: Where) -> SkywardError | None:
    """Return the error for the caller, with call, region, cause and advice; None if it is not AWS's."""
    found = refusal(error)
    return None if found is None else explain(found, where)


def explain(found: Refusal, where: Where) -> SkywardError:
    """Return the error for a refusal."""
    return ERRORS[found.kind](
        f"{where} was refused: {found.code}: {found.message.rstrip('.')}. {_advice(found, where)}"
    )


def _kind(code: str, message: str, status: int) -> RefusalKind:
    by_message = next((kind for (known, part), kind in _MESSAGES.items() if known == code and part in message), None)
    if (kind := by_message or CODES.get(code)) is not None:
        return kind
    if code.startswith(("Throttl", "RequestLimit")) or status == _HTTP_TOO_MANY:
        return RefusalKind.RATE
    return RefusalKind.TRANSIENT if status >= _HTTP_SERVER_ERROR else RefusalKind.BAD_REQUEST


_KIND_ADVICE: Final[Mapping[RefusalKind, str]] = {
    RefusalKind.AUTH: "Check the credentials: `aws sts get-caller-identity` shows whose they are",
    RefusalKind.QUOTA: "See the account's limits, and request higher ones: "
    "https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas",
    RefusalKind.CAPACITY: "Another machine type, zone, region or spot strategy may have some",
    RefusalKind.RATE: "It was retried and refused each time; wait some minutes, or run fewer pools at once",
    RefusalKind.TRANSIENT: "Check this machine's network, then https://health.aws.amazon.com for the region",
    RefusalKind.MISSING: "It may have been deleted from outside Skyward; try again",
    RefusalKind.EXISTS: "Something else of that name exists; remove it",
    RefusalKind.IN_USE: "It is still in use; delete it later",
    RefusalKind.BAD_REQUEST: "Correct the request; if Skyward made it up, please report this",
}
_LOG_IN = "Refresh them: `aws sso login{profile}`, or new keys in the environment or in ~/.aws/credentials"
_ALLOW = 'An administrator of the account must allow the action "{action}" for this identity (docs/providers/aws.md)'
_CODE_ADVICE: Final[Mapping[str, str]] = {
    "NoCredentialsError": "Provide credentials: `aws configure`, `aws sso login`, AWS(profile=...), "
    "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
    "PartialCredentialsError": "Set both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "ProfileNotFound": "`aws configure list-profiles` lists the profiles; AWS(profile=...) must be one of them",
    "ExpiredToken": _LOG_IN,
    "ExpiredTokenException": _LOG_IN,
    "RequestExpired": "The credentials have expired, or this machine's clock is wrong. " + _LOG_IN,
    "TokenRetrievalError": _LOG_IN,
    "SSOTokenLoadError": _LOG_IN,
    "UnauthorizedSSOTokenError": _LOG_IN,
    "CredentialRetrievalError": _LOG_IN,
    "LoginRefreshRequired": "Log in again: `aws login{profile}`",
    "LoginTokenLoadError": "Log in again: `aws login{profile}`",
    "UnauthorizedOperation": _ALLOW,
    "AccessDenied": _ALLOW,
    "AccessDeniedException": _ALLOW,
    "NotAuthorized": _ALLOW,
    "AuthFailure": "The key is wrong or disabled, or this region is not enabled for the account "
    "(`aws account enable-region --region-name {region}`), or this machine's clock is wrong",
    "InvalidClientTokenId": "The access key is wrong or deleted, or the region {region} is not enabled for the account",
    "UnrecognizedClientException": "The access key is wrong or deleted, or the region {region} is not enabled for the "
    "account",
    "SignatureDoesNotMatch": "The secret key does not belong to the access key, or this machine's clock is wrong",
    "OptInRequired": "The account is not subscribed to this service or image: open it once in the console of {region}, "
    "or enable the region (`aws account enable-region --region-name {region}`)",
    "TargetNotConnected": "Its agent has not registered: the machine's role needs the policy "
    "AmazonSSMManagedInstanceCore, and the machine a way to the internet or to Systems Manager's endpoints",
    "PendingVerification": "AWS is still checking the account for this region: try again in some hours, or in another "
    "region",
}


def _advice(found: Refusal, where: Where) -> str:
    text = _CODE_ADVICE.get(found.code, _KIND_ADVICE[found.kind])
    profile = f" --profile {where.profile}" if where.profile else ""
    return text.format(region=where.region, profile=profile, action=f"{where.service}:{where.operation}")
