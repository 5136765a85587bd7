"""Calls of AWS's APIs: in threads, retried where that is safe; errors and credentials in Skyward's words."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    retry_if_result,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from skyward.base.waiting import CALL_LIMIT_S, to_its_end
from skyward.errors import ConfigurationError, SkywardError
from skyward.providers._common.refusals import Refusal, RefusalKind, RefusalRow, RefusalTable, RefusedCall, is_kind
from skyward.request.checks import closest

_KEY: Final = "AWS_ACCESS_KEY_ID"
_SOURCES: Final = (
    _KEY,
    "AWS_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables of the environment that hold credentials, or say where they are."""
_PLACES: Final = {
    "Environment": "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "Ec2InstanceMetadata": "the role of the EC2 machine that this runs on",
    "EcsContainer": "the role of the container that this runs in",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginAdvice:
    """How to renew credentials.

    Attributes:
        advice: the next step, as a sentence without a full stop.
        needs_code: True if a role asks for the code of a device, which must be typed in.
    """

    advice: str
    needs_code: bool = False


def may_have_credentials() -> bool:
    """Return whether boto3 would look for credentials anywhere but on the network, or may find a machine's role there.

    To ask boto3 itself takes half a second to import, and seconds where no role answers.
    """
    folder = Path.home() / ".aws"
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials",
        os.environ.get("AWS_CONFIG_FILE") or folder / "config",
    )
    if any(os.environ.get(name) for name in _SOURCES) or any(os.path.isfile(each) for each in files):
        return True
    try:
        return Path("/sys/class/dmi/id/sys_vendor").read_text(encoding="utf-8").startswith("Amazon EC2")
    except (OSError, ValueError):
        return False


def find_login_here(profile: str | None) -> LoginAdvice:
    """Return how to renew the credentials of a profile of this machine; None means the usual chain."""
    return find_login(profile, _configuration(), os.environ)


def profiles_here() -> str:
    """Return the profiles of this machine as a clause for a message; empty if there are none."""
    names = sorted(_configuration())
    return f", one of {', '.join(names)}" if names else ""


def closest_profile(name: str | None) -> str:
    """Return the configured profiles whose names resemble that of a missing one, as a clause for a message."""
    profiles = _configuration()
    wanted = name or os.environ.get("AWS_PROFILE") or ""
    from_variable = "" if name or not wanted else f"AWS_PROFILE is {wanted!r}; "
    if not profiles:
        return f"{from_variable}there are none: `aws configure`, or `aws configure sso`"
    near = closest(wanted, profiles)
    return from_variable + (near.removeprefix("; ") or f"there are {', '.join(sorted(profiles))}")


def find_login(profile: str | None, profiles: Mapping[str, Mapping[str, Any]], env: Mapping[str, str]) -> LoginAdvice:
    """Return how to renew the credentials that botocore takes (pure).

    A role is not logged in to: its credentials come with those of another profile, a program, or a token.

    Args:
        profile: the profile that the user has chosen; None means the usual chain.
        profiles: the shared configuration by profile.
        env: the environment.
    """
    if profile is None and _KEY in env:
        hidden = f"; AWS_PROFILE={env['AWS_PROFILE']} has no effect beside them" if "AWS_PROFILE" in env else ""
        way = "renew them, or unset them and log in with a profile, `aws sso login` for example"
        return LoginAdvice(advice=f"The keys are those of {_KEY} in the environment: {way}{hidden}")
    if profile is None and env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return LoginAdvice(advice=_token_advice("AWS_WEB_IDENTITY_TOKEN_FILE", env["AWS_WEB_IDENTITY_TOKEN_FILE"]))
    chain = _chain(profile or env.get("AWS_PROFILE") or env.get("AWS_DEFAULT_PROFILE") or "default", profiles)
    first, last = chain[0], chain[-1]
    role = f"Profile {first} takes a role with the credentials of profile {last}. " if len(chain) > 1 else ""
    needs_code = any("mfa_serial" in profiles.get(name, {}) for name in chain)
    code = (
        f"; its role asks for an MFA code: run this in a terminal, or get the credentials before: "
        f'eval "$(aws configure export-credentials --profile {shlex.quote(first)} --format env)"'
        if needs_code
        else ""
    )
    return LoginAdvice(advice=f"{role}{_advice(last, profiles.get(last, {}))}{code}", needs_code=needs_code)


def _chain(name: str, profiles: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a profile and those that its roles are taken with, up to the one with credentials."""
    chain = [name]
    while True:
        settings = profiles.get(chain[-1], {})
        source = settings.get("source_profile")
        if "role_arn" not in settings or "web_identity_token_file" in settings or not source or source in chain:
            return chain
        chain.append(str(source))


def _advice(name: str, settings: Mapping[str, Any]) -> str:
    chosen = f"--profile {shlex.quote(name)}"
    if "web_identity_token_file" in settings:
        return _token_advice(f"profile {name}", str(settings["web_identity_token_file"]))
    if "role_arn" in settings and "credential_source" in settings:
        source = str(settings["credential_source"])
        return f"Profile {name} takes its role with {_PLACES.get(source, source)}: check those"
    if "sso_session" in settings or "sso_start_url" in settings:
        return f"Log in: `aws sso login {chosen}`"
    if "login_session" in settings:
        return f"Log in: `aws login {chosen}`"
    if "aws_access_key_id" in settings:
        kind = "temporary keys" if "aws_session_token" in settings else "keys"
        return f"Profile {name} has {kind} in ~/.aws: write new ones there, `aws configure {chosen}`"
    if "credential_process" in settings:
        program = _program_of(str(settings["credential_process"]))
        return (
            f"Profile {name} gets its credentials from the program {program}: log in the way that it asks for, until "
            f"`aws sts get-caller-identity {chosen}` works"
        )
    return f"Log in, `aws sso login {chosen}`, or write keys of profile {name}, `aws configure {chosen}`"


def _program_of(command: str) -> str:
    try:
        return next(iter(shlex.split(command)), "")
    except ValueError:  # a quotation mark without its second
        return command


def _token_advice(where: str, path: str) -> str:
    return f"{where} names {path} as the token to take the role with: have that written again"


def _configuration() -> Mapping[str, Mapping[str, Any]]:
    """Return the shared configuration by profile; nothing if it cannot be read, which botocore says better."""
    import botocore.session
    from botocore.exceptions import BotoCoreError

    try:
        full = cast("Mapping[str, Any]", botocore.session.Session().full_config)
    except BotoCoreError:
        return {}
    return cast("Mapping[str, Mapping[str, Any]]", full.get("profiles", {}))


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
    """Return the class of botocore's own exceptions by base class; the nearest one counts, else the request is wrong.

    Raises:
        ConfigurationError: boto3 is not installed.
    """
    from botocore import exceptions

    names: Mapping[RefusalKind, str] = {
        RefusalKind.AUTH: """NoCredentialsError NoAuthTokenError TokenRetrievalError UnknownTokenProviderError
            PartialCredentialsError CredentialRetrievalError UnknownCredentialError SSOError LoginError
            RefreshWithMFAUnsupportedError""",
        RefusalKind.TRANSIENT: """HTTPClientError ConnectionError IncompleteReadError ChecksumError
            FlexibleChecksumError AwsChunkedWrapperError MetadataRetrievalError WaiterError""",
        RefusalKind.CAPACITY: "CapacityNotAvailableError",
    }
    # Older releases of botocore lack some of these exceptions.
    found = {name: kind for kind, listed in names.items() for name in listed.split() if hasattr(exceptions, name)}
    return {
        exceptions.BotoCoreError: RefusalKind.BAD_REQUEST,
        **{getattr(exceptions, name): kind for name, kind in found.items()},
    }


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


Json = dict[str, Any]
T = TypeVar("T")

_CONNECT_TIMEOUT_S: Final = 5.0
_READ_TIMEOUT_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.3
_LONGEST_PAUSE_S: Final = 10.0
_READING: Final = ("Describe", "Get", "List")
_POOL: Final = 32
_SOON_S: Final = 3.0
_logger = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Account and region of an API.

    Attributes:
        region: default region of the calls.
        profile: profile of the shared configuration; None means the usual chain of credentials.
        endpoint_url: endpoint used instead of AWS's; None means AWS's, or the configured one.
    """

    region: str
    profile: str | None = None
    endpoint_url: str | None = None


@dataclass(slots=True, eq=False)
class Api:
    """API of one account in one region; clients are created on demand and shared by threads.

    Attributes:
        credentials: account and region.
        patience_s: throttled and interrupted calls are retried for so long.
    """

    credentials: Credentials
    patience_s: float
    _silent: set[str] = field(default_factory=set[str])
    # Client of each service, region and limit on its answers, and the credentials that it was created with.
    _clients: dict[tuple[str, str, float], Any] = field(default_factory=dict[tuple[str, str, float], Any], repr=False)
    _session: Any = field(default=None, repr=False)  # to create one takes as long as a client of a small service
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def ask(self, service: str, operation: str, *, region: str = "", **parameters: Any) -> Json | None:
        """Return the answer to an optional question; None if it is refused, or does not come within 3 s.

        A service that has left one unanswered, or does not permit it, is asked no other.
        """
        if service in self._silent:
            return None
        try:
            where = self._where(service, operation, region)
            return await self._persist(where, parameters, patience_s=min(self.patience_s, _SOON_S))
        except SkywardError as error:
            _logger.debug("not known: %s", error)
            if not is_kind(error, RefusalKind.RATE, RefusalKind.MISSING):  # those concern this question only
                self._silent.add(service)
            return None

    async def call(self, service: str, operation: str, *, done: Sequence[RefusalKind] = (), **parameters: Any) -> Json:
        """Make one call, ``"ec2", "RunInstances"``.

        Throttled and interrupted calls are retried; a call that creates something therefore carries a client token. If
        the credentials have expired and there are newer ones, the call is made once more with those. A call that
        changes something completes even if the caller is cancelled, so that its result is never overlooked. A refusal
        of the kinds ``done`` shows that there is nothing left to do: the answer is empty.

        :func:`~skyward.providers.aws.api.is_lost` is true of an error after which the call may have taken effect: an
        answer was lost, and the answers to later attempts, such as throttling, do not settle the question.
        """
        try:
            return await self._persist(self._where(service, operation), parameters)
        except SkywardError as error:
            if is_kind(error, *done):
                return {}
            raise

    async def pages(self, service: str, operation: str, member: str, **parameters: Any) -> Any:
        """Return every item of ``member`` in all pages of an answer."""
        return (await self._persist(self._where(service, operation), parameters, pages=member))[member]

    async def endpoint(self, service: str) -> str:
        """Return the URL of a service's endpoint."""
        client, _ = await asyncio.to_thread(self._client, self._where(service, ""))
        return str(client.meta.endpoint_url)

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client, _ in clients:
            client.close()

    def _where(self, service: str, operation: str, region: str = "") -> Where:
        region, profile = region or self.credentials.region, self.credentials.profile
        return Where(region=region, service=service, operation=operation, profile=profile)

    async def _persist(
        self, where: Where, parameters: Mapping[str, Any], *, patience_s: float | None = None, pages: str | None = None
    ) -> Json:
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: is_kind(error, RefusalKind.RATE, RefusalKind.TRANSIENT)),
            stop=stop_after_delay(self.patience_s if patience_s is None else patience_s),
            wait=wait_exponential(_FIRST_PAUSE_S, _LONGEST_PAUSE_S) + wait_random(0, _FIRST_PAUSE_S),
            reraise=True,
        )
        lost: list[SkywardError] = []
        try:
            return cast("Json", await retrying(self._attempt, where, parameters, pages, lost))
        except SkywardError as error:
            unsettled = is_kind(error, RefusalKind.AUTH, RefusalKind.RATE, RefusalKind.TRANSIENT)
            if lost and unsettled and not is_lost(error):
                raise error from lost[0]
            raise

    async def _attempt(
        self, where: Where, parameters: Mapping[str, Any], pages: str | None, lost: list[SkywardError]
    ) -> Json:
        """Make one attempt of a call; append its error to ``lost`` if the call may have taken effect."""
        working = asyncio.to_thread(self._ask, where, parameters, pages)
        if where.operation.startswith(_READING):
            return await working
        try:
            return await to_its_end(working)
        except SkywardError as error:
            if is_lost(error):
                lost.append(error)
            raise

    def _ask(self, where: Where, parameters: Mapping[str, Any], pages: str | None) -> Json:
        client, keys = convert_errors(where, lambda: self._client(where))
        try:
            return convert_errors(where, lambda: _answer(client, where.operation, parameters, pages))
        except SkywardError as error:
            if not is_stale(error):
                raise
            newer, newer_keys = convert_errors(where, lambda: self._client(where, stale=keys))
            if newer_keys in (None, keys):
                raise
        return convert_errors(where, lambda: _answer(newer, where.operation, parameters, pages))

    def _client(self, where: Where, *, stale: Any = ()) -> tuple[Any, Any]:
        """Return a client and its credentials, which are newer than ``stale`` if there are newer ones."""
        limit_s = min(CALL_LIMIT_S.get(), _READ_TIMEOUT_S)
        key = (where.service, where.region, limit_s)
        with self._lock:
            if key not in self._clients or self._clients[key][1] == stale:
                self._clients[key] = self._make(where, limit_s, renewed=key in self._clients)
            return self._clients[key]

    def _make(self, where: Where, limit_s: float, *, renewed: bool) -> tuple[Any, Any]:
        from botocore.config import Config

        if renewed or self._session is None:
            self._session = new_session(profile=self.credentials.profile, region=self.credentials.region)
        config = Config(
            connect_timeout=min(_CONNECT_TIMEOUT_S, limit_s),
            read_timeout=limit_s,
            max_pool_connections=_POOL,
            retries={"mode": "standard", "total_max_attempts": 1},  # botocore would retry refusals for lack of capacity
        )
        place = {"region_name": where.region, "endpoint_url": self.credentials.endpoint_url}
        keys = load_keys(self._session, self.credentials.profile)
        return self._session.client(where.service, config=config, **place), keys


def convert_errors(where: Where, work: Callable[[], T]) -> T:
    """Run ``work``; convert errors of AWS and botocore to Skyward's. Other errors pass."""
    try:
        return work()
    except SkywardError:
        raise
    except Exception as error:
        if (converted := explained(error, where)) is None:
            raise
        raise converted from converted.__cause__


def _answer(client: Any, operation: str, parameters: Mapping[str, Any], pages: str | None) -> Json:
    method = next(name for name, made in client.meta.method_to_api_mapping.items() if made == operation)
    if pages is None:
        return cast("Json", getattr(client, method)(**parameters))
    found: Sequence[Json] = list(client.get_paginator(method).paginate(**parameters))
    return {pages: [item for page in found for item in page.get(pages, ())]}


def load_keys(session: Any, profile: str | None) -> Any:
    """Return a session's present credentials; None if it has none. Blocks: may run a program, or ask AWS.

    Programs, files and prompts of a profile fail in ways of their own, which become botocore's error for that. An MFA
    code is only asked for at a terminal.
    """
    from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, RefreshWithMFAUnsupportedError

    if find_login_here(profile).needs_code and not _is_at_terminal():
        raise RefreshWithMFAUnsupportedError
    try:
        credentials = session.get_credentials()
        return None if credentials is None else credentials.get_frozen_credentials()
    except (BotoCoreError, ClientError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error.strerror}" if isinstance(error, OSError) else type(error).__name__
        raise CredentialRetrievalError(provider="the profile", error_msg=why) from error


def _is_at_terminal() -> bool:
    try:
        return sys.stdin.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def chosen_profile(session: Any) -> str | None:
    """Return the profile that a session of boto3's was made with; None if it takes the usual chain of credentials."""
    name = str(session.profile_name)
    return None if name == os.environ.get("AWS_PROFILE", "default") else name


def new_session(*, profile: str | None = None, region: str | None = None) -> Any:
    """Create a session of boto3's with the present credentials.

    Raises:
        ConfigurationError: boto3 is not installed.
    """
    try:
        import boto3.session
        import botocore.session
    except ImportError as error:
        raise ConfigurationError("AWS() needs boto3: pip install 'skyward-fleet[aws]'") from error
    core: Any = botocore.session.Session()
    core.register_component("data_loader", _loader())
    session: Any = boto3.session.Session(botocore_session=core, profile_name=profile, region_name=region)
    return session


@cache
def _loader() -> Any:
    """Return the loader of service descriptions, shared by all sessions: reading them takes longer than most calls."""
    from botocore import loaders

    reader: Any = loaders
    return reader.create_loader(os.environ.get("AWS_DATA_PATH"))


_VISIBLE_S: Final = 45.0
_LOOK_S: Final = 0.5
_UNSEEN: Final = ("InvalidGroup.NotFound", "InvalidSecurityGroupID.NotFound", "InvalidLaunchTemplateId.NotFound")
_PROFILE: Final = "InvalidParameterValue"


async def patiently(
    api: Api, operation: str, call: Callable[[int], Mapping[str, Any]], *, instance_profile: str | None
) -> Mapping[str, Any]:
    """Make a call of EC2's; retry it while EC2 does not list a resource that was created just before.

    A fleet reports that in its answer. Another fleet is requested then; at the deadline its answer is returned.

    Args:
        api: the account.
        operation: name of the call.
        call: returns the call's parameters, given the number of such answers so far.
        instance_profile: the role named in the call; None for none.

    Raises:
        ConfigurationError: the role still does not exist at the deadline; or as for any call.
    """
    turn = 0

    async def attempt() -> Mapping[str, Any]:
        nonlocal turn
        answer = await api.call("ec2", operation, **call(turn))
        turn += 1
        return answer

    retrying = AsyncRetrying(
        retry=retry_if_exception(lambda error: _is_unseen(refusal(error))) | retry_if_result(_is_unseen_by_fleet),
        stop=stop_after_delay(_VISIBLE_S),
        wait=wait_exponential(_LOOK_S, 10 * _LOOK_S),
        retry_error_callback=lambda last: cast("Any", last.outcome).result(),
    )
    try:
        return cast("Mapping[str, Any]", await retrying(attempt))
    except SkywardError as error:
        raise (_no_profile(instance_profile) if _lacks_profile(refusal(error)) else error) from error.__cause__


def refused_by_fleet(row: Mapping[str, Any], region: str, *, instance_profile: str | None) -> SkywardError:
    """Return the error for one of the refusals in a fleet's answer."""
    where = Where(region=region, service="ec2", operation="CreateFleet")
    return _no_profile(instance_profile) if _lacks_profile(found := _judged(row)) else explain(found, where)


def _judged(row: Mapping[str, Any]) -> Refusal:
    return judge(str(row.get("ErrorCode", "")), str(row.get("ErrorMessage", "")))


def _is_unseen_by_fleet(answer: Mapping[str, Any]) -> bool:
    return not answer.get("Instances") and any(_is_unseen(_judged(row)) for row in answer.get("Errors", ()))


def _is_unseen(found: Refusal | None) -> bool:
    return found is not None and (found.code in _UNSEEN or _lacks_profile(found))


def _lacks_profile(found: Refusal | None) -> bool:
    """Return whether the refusal is about a role that does not exist, or not yet."""
    return found is not None and found.code == _PROFILE and "IAM Instance Profile" in found.message


def _no_profile(name: str | None) -> ConfigurationError:
    return ConfigurationError(
        f"instance_profile={name!r} does not exist in the account: `aws iam list-instance-profiles` lists those that do"
    )
