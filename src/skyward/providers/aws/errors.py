"""Table of the errors of AWS and botocore, their meaning for the caller, and the advice in messages."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, cast

from skyward.errors import SkywardError
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable, RefusedCall
from skyward.providers.aws.profiles import closest_profile, find_login_here, profiles_here

__all__ = ["CODES", "Where", "explain", "explained", "is_lost", "is_stale", "judge", "meanings", "refusal"]

_LOG_IN = "{login}"
_FORBIDDEN: Final = "UnauthorizedOperation AccessDenied AccessDeniedException NotAuthorized"
_AUTH: Final[Mapping[str, str]] = {
    _FORBIDDEN: 'An administrator of the account must allow the action "{action}" for this identity '
    "(docs/providers/aws.md)",
    "ExpiredToken ExpiredTokenException TokenRetrievalError CredentialRetrievalError": _LOG_IN,
    "SSOTokenLoadError UnauthorizedSSOTokenError": _LOG_IN,
    "RequestExpired": "The credentials have expired, or this machine's clock is wrong. " + _LOG_IN,
    "LoginRefreshRequired LoginTokenLoadError RefreshWithMFAUnsupportedError": _LOG_IN,
    "NoCredentialsError": "Provide credentials: `aws configure`, `aws sso login`, AWS(profile=...){profiles}, "
    "or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
    "PartialCredentialsError": "Set both parts of the key, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. {login}",
    "AuthFailure": "The key is wrong or disabled, or this region is not enabled for the account "
    "(`aws account enable-region --region-name {region}`), or this machine's clock is wrong",
    "InvalidClientTokenId UnrecognizedClientException": "The access key is wrong or deleted, or the region {region} is "
    "not enabled for the account. {login}",
    "SignatureDoesNotMatch": "The secret key does not belong to the access key, or this machine's clock is wrong. "
    "{login}",
    "OptInRequired": "The account is not subscribed to this service or image: open it once in the console of {region}, "
    "or enable the region (`aws account enable-region --region-name {region}`)",
    "Blocked IncompleteSignature MissingAuthenticationToken MissingAuthenticationTokenException": "",
    "InvalidSignatureException SubscriptionRequiredException": "",
}
"""Codes of refused credentials, with the advice; without one that of the class."""

_TABLE: Final = RefusalTable(
    rows=(
        *(RefusalRow(kind=RefusalKind.AUTH, codes=codes, advice=advice) for codes, advice in _AUTH.items()),
        RefusalRow(
            kind=RefusalKind.BAD_REQUEST,
            codes="ProfileNotFound",
            advice="AWS(profile=...) must be one of the profiles here, which `aws configure list-profiles` lists; "
            "{closest}",
        ),
        RefusalRow(
            kind=RefusalKind.BAD_REQUEST,
            codes="InvalidConfigError InfiniteLoopConfigError ConfigParseError",
            advice="Correct ~/.aws/config (or the file in AWS_CONFIG_FILE): "
            "`aws configure list-profiles` lists the profiles",
        ),
        RefusalRow(
            kind=RefusalKind.QUOTA,
            codes="PendingVerification",
            advice="AWS is still checking the account for this region: try again in some hours, or in another region",
        ),
        RefusalRow(
            kind=RefusalKind.QUOTA,
            codes="""VcpuLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded VolumeLimitExceeded
                AddressLimitExceeded SecurityGroupLimitExceeded RulesPerSecurityGroupLimitExceeded
                MaxSpotFleetRequestCountExceeded InstanceCreditSpecification.NotSupported
                LaunchTemplateLimitExceeded""",
        ),
        RefusalRow(
            kind=RefusalKind.CAPACITY,
            codes="""InsufficientInstanceCapacity InsufficientCapacity UnfulfillableCapacity InsufficientHostCapacity
                InsufficientReservedInstanceCapacity InsufficientFleetCapacity SpotMaxPriceTooLow Unsupported
                InsufficientFreeAddressesInSubnet InsufficientVolumeCapacity Server.InsufficientInstanceCapacity""",
        ),
        RefusalRow(
            kind=RefusalKind.RATE,
            codes="""Throttl* RequestLimit* EC2ThrottledException TooManyRequestsException RequestThrottled
                RequestThrottledException SlowDown BandwidthLimitExceeded PriorRequestNotComplete
                LimitExceededException""",
        ),
        RefusalRow(
            kind=RefusalKind.TRANSIENT,
            codes="""InternalError InternalFailure InternalServerError ServiceUnavailable Unavailable RequestTimeout
                RequestTimeoutException ServerInternal TransactionInProgressException ExpiredNextTokenException""",
        ),
        RefusalRow(
            kind=RefusalKind.MISSING,
            codes="TargetNotConnected",
            advice="Its agent has not registered: the machine's role needs the policy AmazonSSMManagedInstanceCore, "
            "and the machine a way to the internet or to Systems Manager's endpoints",
        ),
        RefusalRow(
            kind=RefusalKind.MISSING,
            codes="""InvalidInstanceID.* InvalidGroup.NotFound InvalidGroupId.Malformed InvalidKeyPair.NotFound
                InvalidLaunchTemplateId.* InvalidLaunchTemplateName.NotFoundException InvalidSubnetID.*
                InvalidVpcID.NotFound InvalidAMIID.* ParameterNotFound NoSuchResourceException
                InvalidSpotInstanceRequestID.NotFound InvalidSecurityGroupID.NotFound""",
        ),
        RefusalRow(kind=RefusalKind.MISSING, codes="InvalidParameterValue", words="Invalid IAM Instance Profile"),
        RefusalRow(
            kind=RefusalKind.EXISTS,
            codes="*.Duplicate InvalidLaunchTemplateName.AlreadyExistsException",
        ),
        RefusalRow(
            kind=RefusalKind.IN_USE,
            codes="DependencyViolation ResourceInUse IncorrectInstanceState IncorrectState InvalidGroup.InUse",
        ),
    ),
    advice={
        RefusalKind.AUTH: "Check the credentials: `aws sts get-caller-identity{profile}` shows whose they are. {login}",
        RefusalKind.QUOTA: "See the account's limits, and request higher ones: "
        "https://{region}.console.aws.amazon.com/servicequotas/home/services/ec2/quotas",
        RefusalKind.CAPACITY: "Another machine type, zone, region or spot strategy may have some",
        RefusalKind.TRANSIENT: "Check this machine's network, then https://health.aws.amazon.com for the region",
    },
)
"""Errors of EC2, Pricing, Service Quotas, Systems Manager and botocore."""

CODES: Final = _TABLE.codes
"""Class of each error code."""

judge: Final = _TABLE.judge

_VALID: Final = (*_FORBIDDEN.split(), "OptInRequired", "Blocked", "SubscriptionRequiredException")
"""Codes for valid credentials without the permission."""

_OF_CREDENTIALS: Final = {
    "AssumeRole": "The role must trust the identity that takes it, which needs the action sts:AssumeRole; a required "
    "MFA code (mfa_serial) or external_id belongs into the profile. {login}",
    "AssumeRoleWithWebIdentity": "The role must trust the token's issuer, and the token must not have expired. {login}",
    "GetRoleCredentials": "The user who logged in has no such role in that account: check sso_account_id and "
    "sso_role_name of the profile. {login}",
}
"""Calls by which botocore gets credentials for others, with the advice if they are refused."""

_UNSENT: Final = ("EndpointConnectionError", "ConnectTimeoutError")
"""Errors of calls that were never sent, for lack of a connection."""


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
            RefreshWithMFAUnsupportedError""",
        RefusalKind.TRANSIENT: """HTTPClientError
            ConnectionError IncompleteReadError ChecksumError FlexibleChecksumError
            AwsChunkedWrapperError MetadataRetrievalError WaiterError""",
        RefusalKind.CAPACITY: "CapacityNotAvailableError",
        RefusalKind.BAD_REQUEST: """DataNotFoundError UnknownRegionError ApiVersionNotFoundError
            InvalidIMDSEndpointError InvalidIMDSEndpointModeError UnknownSignatureVersionError ServiceNotInRegionError
            BaseEndpointResolverError
            ProfileNotFound ConfigParseError ConfigNotFound InfiniteLoopConfigError MissingParametersError
            ValidationError ParamValidationError
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


def refusal(error: BaseException) -> Refusal | None:
    """Classify ``error``, or return the refusal that caused it; None if it is neither AWS's nor botocore's."""
    from botocore.exceptions import ClientError
    from botocore.parsers import ResponseParserError

    if isinstance(error, SkywardError):
        return error.__cause__.refusal if isinstance(error.__cause__, RefusedCall) else None
    if isinstance(error, ClientError):
        response = cast("Mapping[str, Any]", error.response)
        code, message = (str(response.get("Error", {}).get(name, "")) for name in ("Code", "Message"))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return _of_credentials(judge(code, message, status=status), str(cast("Any", error).operation_name))
    # ResponseParserError is an answer of a proxy or gateway instead of AWS: the call may have taken effect.
    known = {**meanings(), ResponseParserError: RefusalKind.TRANSIENT}
    kind = next((known[base] for base in type(error).__mro__ if base in known), None)
    return None if kind is None else replace(judge(type(error).__name__, str(error).strip()), kind=kind)


def _of_credentials(found: Refusal, operation: str) -> Refusal:
    """Return the refusal of a call, which may be one that botocore made to get credentials for it."""
    if operation not in _OF_CREDENTIALS or found.kind in (RefusalKind.RATE, RefusalKind.TRANSIENT):
        return found
    advice = found.advice if found.code.startswith("Expired") else _OF_CREDENTIALS[operation]
    return replace(found, kind=RefusalKind.AUTH, advice=advice)


def is_lost(error: BaseException) -> bool:
    """Return whether the failed call may have taken effect: it may have arrived, but its answer was lost.

    The error of a retried call has the error of the unanswered attempt as its cause, if there was one.
    """
    found = refusal(error)
    return found is None or (found.kind is RefusalKind.TRANSIENT and found.code not in _UNSENT)


def is_stale(error: BaseException) -> bool:
    """Return whether ``error`` is a refusal of invalid or expired credentials, which newer ones may replace."""
    found = refusal(error)
    return found is not None and found.kind is RefusalKind.AUTH and found.code not in _VALID


def explained(error: BaseException, where: Where) -> SkywardError | None:
    """Return the error for the caller, with call, region, cause and advice; None if it is not AWS's."""
    found = refusal(error)
    return None if found is None else explain(found, where)


def explain(found: Refusal, where: Where) -> SkywardError:
    """Return the error for a refusal, which is its cause."""
    words = {
        "region": where.region,
        "profile": f" --profile {shlex.quote(where.profile)}" if where.profile else "",
        "action": f"{where.service}:{where.operation}",
        "login": "",
        "closest": "",
        "profiles": "",
    }
    if found.kind is RefusalKind.AUTH:
        words |= {"login": find_login_here(where.profile).advice, "profiles": profiles_here()}
    if found.code == "ProfileNotFound":
        words |= {"closest": closest_profile(where.profile)}
    error = _TABLE.explain(found, str(where), **words)
    error.__cause__ = RefusedCall(found)
    return error
