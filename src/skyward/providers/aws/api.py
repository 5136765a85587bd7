"""Calls of AWS's APIs: in threads, retried where that is safe, with Skyward's errors."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar, cast

from tenacity import (
    AsyncRetrying,
    retry_if_exception,
    retry_if_result,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from skyward._concurrency.waiting import to_its_end
from skyward.errors import ConfigurationError, SkywardError
from skyward.providers._common.refusals import Refusal, RefusalKind, is_kind
from skyward.providers.aws.errors import Where, explain, explained, is_lost, is_stale, judge, refusal
from skyward.providers.aws.profiles import find_login_here

__all__ = [
    "Api",
    "Credentials",
    "Json",
    "chosen_profile",
    "convert_errors",
    "load_keys",
    "new_session",
    "patiently",
    "refused_by_fleet",
]

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
    # Client of each service and region, and the credentials that it was created with.
    _clients: dict[tuple[str, str], Any] = field(default_factory=dict[tuple[str, str], Any], repr=False)
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

        :func:`~skyward.providers.aws.errors.is_lost` is true of an error after which the call may have taken effect: an
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
        key = (where.service, where.region)
        with self._lock:
            if key not in self._clients or self._clients[key][1] == stale:
                self._clients[key] = self._make(where, renewed=key in self._clients)
            return self._clients[key]

    def _make(self, where: Where, *, renewed: bool) -> tuple[Any, Any]:
        from botocore.config import Config

        if renewed or self._session is None:
            self._session = new_session(profile=self.credentials.profile, region=self.credentials.region)
        config = Config(
            connect_timeout=_CONNECT_TIMEOUT_S,
            read_timeout=_READ_TIMEOUT_S,
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
