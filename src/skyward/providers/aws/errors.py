"""The one table of what AWS and botocore answer, and what it means to who asked."""

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
    """What a refusal means for what comes next."""

    AUTH = "auth"
    """Who asks may not. Fatal."""
    QUOTA = "quota"
    """The account may not have more of it. Fatal for this type."""
    CAPACITY = "capacity"
    """There is none of it now: another type or zone may have some."""
    RATE = "rate"
    """Too many requests: the same one again, later."""
    TRANSIENT = "transient"
    """Nobody knows whether it was done: the same one again, with the same token."""
    MISSING = "missing"
    """It is not there: not yet, right after it was made; gone, for who wants to delete it."""
    EXISTS = "exists"
    """It is there already: no error for who wants it to be."""
    IN_USE = "in use"
    """Something still holds it: the same request again, later."""
    BAD_REQUEST = "bad request"
    """What was asked for cannot be. Fatal."""


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
"""The error that a caller gets."""


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
"""Credentials that hold, and do not suffice."""

_UNSENT: Final = ("EndpointConnectionError", "ConnectTimeoutError")
"""There was no connection that the call could have been sent over."""

_MESSAGES: Final[Mapping[tuple[str, str], RefusalKind]] = {
    ("InvalidParameterValue", "Invalid IAM Instance Profile"): RefusalKind.MISSING,
}
"""Codes that only their message tells apart."""

_HTTP_SERVER_ERROR = 500
_HTTP_TOO_MANY = 429


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What was tried.

    Attributes:
        region: where.
        service: ``"ec2"`` and the like.
        operation: ``"RunInstances"`` and the like.
        profile: whose credentials; None means the usual ones.
    """

    region: str
    service: str
    operation: str
    profile: str | None = None

    def __str__(self) -> str:
        return f"aws {self.region}: {self.service} {self.operation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What an answer means.

    Attributes:
        kind: what comes next.
        code: AWS's error code, or the name of botocore's exception.
        message: what was said.
    """

    kind: RefusalKind
    code: str
    message: str


@cache
def meanings() -> Mapping[type[BaseException], RefusalKind]:
    """What botocore raises of itself; the nearest base class counts.

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
    # A release of botocore may lack what a later one has.
    found = {name: kind for kind, listed in names.items() for name in listed.split() if hasattr(exceptions, name)}
    return {getattr(exceptions, name): kind for name, kind in found.items()}


def refusal(error: BaseException | None) -> Refusal | None:
    """What ``error``, or the answer that caused it, means; None if it is neither AWS's nor botocore's."""
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
    # The last is an answer that is not AWS's, but a proxy's or a gateway's: nobody knows whether it was done.
    known = {**meanings(), ResponseParserError: RefusalKind.TRANSIENT}
    kind = next((known[base] for base in type(error).__mro__ if base in known), None)
    return None if kind is None else Refusal(kind=kind, code=type(error).__name__, message=str(error))


def is_kind(error: BaseException, *kinds: RefusalKind) -> bool:
    """Whether ``error`` is an answer that means one of these."""
    found = refusal(error)
    return found is not None and found.kind in kinds


def is_lost(error: BaseException) -> bool:
    """Return whether a call that ended so may have taken effect: it may have arrived, and no answer to it came.

    The error of a call that was repeated has that of the attempt without an answer as its cause, if there was one.
    """
    found = refusal(error)
    return found is None or (found.kind is RefusalKind.TRANSIENT and found.code not in _UNSENT)


def is_stale(error: BaseException) -> bool:
    """Whether ``error`` is an answer to credentials that do not hold, or not any more: newer ones may."""
    found = refusal(error)
    return found is not None and found.kind is RefusalKind.AUTH and found.code not in _FORBIDDEN


def judge(code: str, message: str, *, status: int = 0) -> Refusal:
    """What an error code means; ``status`` is the answer's in HTTP, if it had one of its own."""
    return Refusal(kind=_kind(code, message, status), code=code, message=message)


def explained(error: BaseException, where: Where) -> SkywardError | None:
    """The error for the caller: what was tried where, what was said, and what to do; None if it is not AWS's."""
    found = refusal(error)
    return None if found is None else explain(found, where)


def explain(found: Refusal, where: Where) -> SkywardError:
    """The error that a refusal is."""
    return ERRORS[found.kind](
        f"{where} was refused: {found.code}: {found.message.rstrip('.')}. {_advice(found, where)}"
    )


def _kind(code: str, message: str, status: int) -> RefusalKind:
    told = next((kind for (known, part), kind in _MESSAGES.items() if known == code and part in message), None)
    if (kind := told or CODES.get(code)) is not None:
        return kind
    if code.startswith(("Throttl", "RequestLimit")) or status == _HTTP_TOO_MANY:
        return RefusalKind.RATE
    return RefusalKind.TRANSIENT if status >= _HTTP_SERVER_ERROR else RefusalKind.BAD_REQUEST


_KIND_ADVICE: Final[Mapping[RefusalKind, str]] = {
    RefusalKind.AUTH: "Check the credentials: `aws sts get-caller-identity` says whose they are",
    RefusalKind.QUOTA: "See the account's limits, and ask for higher ones: "
    "https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas",
    RefusalKind.CAPACITY: "Another machine type, zone, region or spot strategy may have some",
    RefusalKind.RATE: "It was repeated and refused each time; wait some minutes, or run fewer pools at once",
    RefusalKind.TRANSIENT: "Check this machine's network, then https://health.aws.amazon.com for the region",
    RefusalKind.MISSING: "It may have been deleted by somebody else",
    RefusalKind.EXISTS: "Something else of that name is there; remove it",
    RefusalKind.IN_USE: "Something still uses it; it can be deleted later",
    RefusalKind.BAD_REQUEST: "Correct what was asked for; if it was not yours, please report it",
}
_LOG_IN = "Refresh them: `aws sso login{profile}`, or new keys in the environment or in ~/.aws/credentials"
_ALLOW = 'Whoever manages the account must allow the action "{action}" to this identity (docs/providers/aws.md)'
_CODE_ADVICE: Final[Mapping[str, str]] = {
    "NoCredentialsError": "Give credentials: `aws configure`, `aws sso login`, AWS(profile=...), "
    "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
    "PartialCredentialsError": "Give both AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "ProfileNotFound": "`aws configure list-profiles` lists what there is; AWS(profile=...) must be one of them",
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
    "SignatureDoesNotMatch": "The secret key is not that of the access key, or this machine's clock is wrong",
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
