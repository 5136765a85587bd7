"""Where AWS's credentials come from, by the shared configuration: the profile to log in with, behind roles."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from skyward.providers._common.machine_catalogue import closest

__all__ = ["LoginAdvice", "closest_profile", "find_login", "find_login_here", "profiles_here"]

_KEY: Final = "AWS_ACCESS_KEY_ID"
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
