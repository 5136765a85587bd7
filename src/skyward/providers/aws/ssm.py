"""SSH through Session Manager: a program that starts a session and becomes the official plugin, which carries it.

Run as ``python -m skyward.providers.aws.ssm``; its input and output are the connection to the machine's sshd.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final

from skyward.errors import ConfigurationError, SkywardError
from skyward.providers.aws.api import Api, Credentials, Json

__all__ = ["PLUGIN", "main", "require_plugin", "session_command"]

PLUGIN: Final = "session-manager-plugin"
_ANSWER_VARIABLE: Final = "AWS_SSM_START_SESSION_RESPONSE"
"""The plugin reads the session's token from the variable of the name it is given: arguments are everybody's to read."""
_DOCUMENT: Final = "AWS-StartSSHSession"
_PACKAGE: Final = (
    "https://s3.amazonaws.com/session-manager-downloads/plugin/latest/ubuntu_64bit/session-manager-plugin.deb"
)
_PATIENCE_S: Final = 10.0


def require_plugin() -> None:
    """Raise :class:`~skyward.errors.ConfigurationError` with the line that installs it, unless the plugin is there."""
    if shutil.which(PLUGIN) is None:
        raise ConfigurationError(
            f"use_ssm=True needs AWS's {PLUGIN} on this machine's PATH. Debian, Ubuntu: `curl -O {_PACKAGE} && "
            f"sudo dpkg -i {PLUGIN}.deb`; macOS: `brew install --cask {PLUGIN}`"
        )


def session_command(credentials: Credentials, instance_id: str, port: int) -> tuple[str, ...]:
    """The command that carries a connection to a machine; whose credentials is said, not what they are."""
    told = {
        "instance": instance_id,
        "port": port,
        "region": credentials.region,
        "profile": credentials.profile,
        "endpoint_url": credentials.endpoint_url,
    }
    return (sys.executable, "-m", "skyward.providers.aws.ssm", json.dumps(told))


def main(argv: Sequence[str]) -> None:
    """Start the session and become the plugin."""
    told = json.loads(argv[0])
    credentials = Credentials(region=told["region"], profile=told["profile"], endpoint_url=told["endpoint_url"])
    wanted: Json = {
        "Target": told["instance"],
        "DocumentName": _DOCUMENT,
        "Parameters": {"portNumber": [str(told["port"])]},
    }
    try:
        require_plugin()
        answer, endpoint = asyncio.run(_start(credentials, wanted))
    except SkywardError as error:
        raise SystemExit(str(error)) from error
    profile = credentials.profile or ""
    arguments = [PLUGIN, _ANSWER_VARIABLE, credentials.region, "StartSession", profile, json.dumps(wanted), endpoint]
    os.execvpe(PLUGIN, arguments, {**os.environ, _ANSWER_VARIABLE: answer})  # noqa: S606 - it takes this one's place


async def _start(credentials: Credentials, wanted: Json) -> tuple[str, str]:
    api = Api(credentials=credentials, patience_s=_PATIENCE_S)
    answer = await api.call("ssm", "StartSession", **wanted)
    session = {name: answer[name] for name in ("SessionId", "TokenValue", "StreamUrl")}
    return json.dumps(session), await api.endpoint("ssm")


if __name__ == "__main__":
    main(sys.argv[1:])
