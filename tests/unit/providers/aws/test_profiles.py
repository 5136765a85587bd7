"""Advice on credentials that cannot be had: it names the profile to log in with. With the real botocore, no network."""

from __future__ import annotations

import asyncio
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from skyward.errors import AuthenticationError, ConfigurationError, SkywardError
from skyward.providers.aws.api import Api, Credentials, Where, explained, find_login, may_have_credentials

ROLE = "role_arn = arn:aws:iam::123456789012:role/train"
CONFIG = f"""
[sso-session corp]
sso_start_url = https://corp.awsapps.com/start
sso_region = us-east-1

[profile people]
sso_session = corp
sso_account_id = 123456789012
sso_role_name = dev

[profile "old sso"]
sso_start_url = https://corp.awsapps.com/start
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = dev

[profile train]
{ROLE}
source_profile = people

[profile chained]
{ROLE}
source_profile = train

[profile quoted]
{ROLE}
source_profile = old sso

[profile broken]
credential_process = /bin/sh -c "echo no ticket >&2; exit 3" --token s3cr3t

[profile "role of broken"]
{ROLE}
source_profile = broken

[profile garbled]
credential_process = /bin/echo not json

[profile nowhere]
credential_process = /no/such/program --password s3cr3t

[profile token]
{ROLE}
web_identity_token_file = /no/such/token

[profile spaced]
credential_process = "/no such/program" --renew

[profile ring]
{ROLE}
source_profile = mirror-ring

[profile mirror-ring]
{ROLE}
source_profile = ring

[profile lost]
{ROLE}
source_profile = peple

[profile code]
{ROLE}
source_profile = keys
mfa_serial = arn:aws:iam::123456789012:mfa/me

[profile keys]
aws_access_key_id = AKIDEXAMPLE
aws_secret_access_key = secret

[profile half]
aws_access_key_id = AKIDEXAMPLE

[profile empty]
region = us-east-1
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    (tmp_path / ".aws").mkdir()
    path = tmp_path / ".aws/config"
    path.write_text(CONFIG)
    return path


def refused(profile: str | None, kind: type[SkywardError] = AuthenticationError) -> str:
    api = Api(credentials=Credentials(region="us-east-1", profile=profile), patience_s=0.1)
    with pytest.raises(kind) as raised:
        asyncio.run(api.call("ec2", "DescribeInstances"))
    api.close()
    return str(raised.value)


@pytest.mark.parametrize(
    ("profile", "advice"),
    [
        ("people", "Log in: `aws sso login --profile people`"),
        ("old sso", "Log in: `aws sso login --profile 'old sso'`"),
        (
            "train",
            "Profile train takes a role with the credentials of profile people. Log in: `aws sso login --profile",
        ),
        (
            "chained",
            "Profile chained takes a role with the credentials of profile people. Log in: `aws sso login --profile",
        ),
        ("quoted", "profile old sso. Log in: `aws sso login --profile 'old sso'`"),
        (
            "broken",
            "no ticket. Profile broken gets its credentials from the program /bin/sh: log in the way that it asks for",
        ),
        (
            "role of broken",
            "credentials of profile broken. Profile broken gets its credentials from the program /bin/sh",
        ),
        ("garbled", "Profile garbled gets its credentials from the program /bin/echo"),
        ("nowhere", "Profile nowhere gets its credentials from the program /no/such/program"),
        ("spaced", "Profile spaced gets its credentials from the program /no such/program: log in"),
        ("token", "profile token names /no/such/token as the token to take the role with: have that written again"),
        ("code", 'eval "$(aws configure export-credentials --profile code --format env)"'),
        ("empty", "AWS(profile=...), one of broken, chained, "),
        ("half", "missing: aws_secret_access_key"),
    ],
)
def test_the_advice_names_the_profile_to_log_in_with(profile: str, advice: str) -> None:
    text = refused(profile)

    assert advice in text
    assert "s3cr3t" not in text


def test_an_expired_sso_token_is_renewed_with_the_profile_that_has_it(tmp_path: Path) -> None:
    import hashlib
    import json

    cache = tmp_path / ".aws/sso/cache"
    cache.mkdir(parents=True)
    name = hashlib.sha1(b"corp", usedforsecurity=False).hexdigest()
    token = {"accessToken": "t0ken", "expiresAt": "2020-01-01T00:00:00Z", "startUrl": "https://corp.awsapps.com/start"}
    (cache / f"{name}.json").write_text(json.dumps(token))

    text = refused("train")

    assert "aws sso login --profile people" in text
    assert "t0ken" not in text


@pytest.mark.parametrize(
    ("profile", "variables", "advice"),
    [
        ("pepole", {}, "closest: people"),
        (None, {"AWS_PROFILE": "trian"}, "AWS_PROFILE is 'trian'; closest: train"),
        ("zzz", {}, "there are broken, chained, code, "),
        ("ring", {}, "Infinite loop in credential configuration"),
        ("ring", {}, "Correct ~/.aws/config (or the file in AWS_CONFIG_FILE)"),
        ("lost", {}, 'The source_profile "peple" referenced in the profile "lost" does not exist'),
    ],
)
def test_a_profile_that_does_not_exist_is_named_with_the_closest(
    profile: str | None, variables: dict[str, str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    text = refused(profile, ConfigurationError)

    assert advice in text
    assert "please report" not in text
    assert "Log in" not in text
    assert not re.search(r"; *;|closest: *;", text)


def test_without_any_profile_the_ways_to_get_one_are_named(config: Path) -> None:
    config.unlink()

    assert "there are none: `aws configure`, or `aws configure sso`" in refused("work", ConfigurationError)


def test_without_credentials_the_profiles_that_exist_are_named() -> None:
    assert "AWS(profile=...), one of broken, chained, code" in refused(None)


PROFILES: dict[str, dict[str, Any]] = {
    "default": {"aws_access_key_id": "a", "aws_secret_access_key": "b", "aws_session_token": "c"},
    "sso": {"sso_session": "corp"},
    "role": {"role_arn": "r", "source_profile": "sso", "mfa_serial": "m"},
    "self": {"role_arn": "r", "source_profile": "self", "aws_access_key_id": "a"},
    "circle": {"role_arn": "r", "source_profile": "elcric"},
    "elcric": {"role_arn": "r", "source_profile": "circle"},
    "machine": {"role_arn": "r", "credential_source": "Ec2InstanceMetadata"},
    "console": {"login_session": "arn"},
}


@pytest.mark.parametrize(
    ("profile", "env", "advice"),
    [
        (None, {}, "Profile default has temporary keys in ~/.aws: write new ones there"),
        (None, {"AWS_PROFILE": "sso"}, "Log in: `aws sso login --profile sso`"),
        (None, {"AWS_DEFAULT_PROFILE": "sso"}, "Log in: `aws sso login --profile sso`"),
        (
            None,
            {"AWS_ACCESS_KEY_ID": "a"},
            "The keys are those of AWS_ACCESS_KEY_ID in the environment: renew them, or unset",
        ),
        (None, {"AWS_ACCESS_KEY_ID": "a", "AWS_PROFILE": "sso"}, "AWS_PROFILE=sso has no effect beside them"),
        (None, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}, "AWS_WEB_IDENTITY_TOKEN_FILE names /t as the token"),
        ("sso", {"AWS_ACCESS_KEY_ID": "a"}, "Log in: `aws sso login --profile sso`"),
        ("role", {}, "`aws sso login --profile sso`; its role asks for an MFA code"),
        ("self", {}, "Profile self has keys in ~/.aws"),
        ("circle", {}, "Profile circle takes a role with the credentials of profile elcric"),
        ("machine", {}, "Profile machine takes its role with the role of the EC2 machine that this runs on"),
        ("console", {}, "Log in: `aws login --profile console`"),
    ],
)
def test_where_credentials_come_from_decides_on_the_advice(
    profile: str | None, env: dict[str, str], advice: str
) -> None:
    assert advice in find_login(profile, PROFILES, env).advice


@pytest.mark.parametrize(
    ("operation", "code", "profile", "parts"),
    [
        ("AssumeRole", "AccessDenied", "train", ["sts:AssumeRole", "trust", "profile people"]),
        ("AssumeRole", "ExpiredToken", "train", ["aws sso login --profile people"]),
        ("AssumeRoleWithWebIdentity", "InvalidIdentityToken", "token", ["/no/such/token"]),
        ("GetRoleCredentials", "ForbiddenException", "people", ["sso_account_id", "sso_role_name"]),
        ("DescribeInstances", "ExpiredToken", "keys", ["aws configure --profile keys"]),
        ("DescribeInstances", "InvalidClientTokenId", "keys", ["profile keys"]),
        ("RunInstances", "UnauthorizedOperation", "train", ['"ec2:RunInstances"']),
    ],
)
def test_refusals_of_what_gives_credentials_are_told_from_those_of_the_call(
    operation: str, code: str, profile: str, parts: list[str]
) -> None:
    answer: Any = {"Error": {"Code": code, "Message": "said so"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    where = Where(region="us-east-1", service="ec2", operation="RunInstances", profile=profile)

    error = explained(ClientError(answer, operation), where)

    assert isinstance(error, AuthenticationError)
    assert [part for part in parts if part in str(error)] == parts


@pytest.mark.parametrize(
    "variable,file,found",
    [
        ("", "", False),
        ("AWS_ACCESS_KEY_ID", "", True),
        ("AWS_PROFILE", "", True),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "", True),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "", True),
        ("", "credentials", True),
        ("", "config", True),
    ],
)
def test_credentials_seem_to_exist_where_boto3_would_look(
    variable: str, file: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in os.environ if each.startswith("AWS_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    if variable:
        monkeypatch.setenv(variable, "here")
    if file:
        (home / ".aws").mkdir(parents=True)
        (home / ".aws" / file).write_text("[default]\n")

    assert may_have_credentials() is found
