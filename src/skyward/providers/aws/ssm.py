"""SSH through Session Manager: program that starts a session, then replaces itself by AWS's plugin.

Run as ``python -m skyward.providers.aws.ssm``; its standard input and output are the connection to the machine's sshd.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from skyward.errors import ConfigurationError, SkywardError
from skyward.providers.aws.api import Api, Credentials, Json

PLUGIN: Final = "session-manager-plugin"
_ANSWER_VARIABLE: Final = "AWS_SSM_START_SESSION_RESPONSE"
"""Variable from which the plugin reads the session's token: arguments are visible to every user."""
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
    """Return the command that connects to a machine's sshd. It names the profile, and holds no credentials."""
    settings = {"instance": instance_id, "port": port, **asdict(credentials)}
    return (sys.executable, "-m", "skyward.providers.aws.ssm", json.dumps(settings))


def main(argv: Sequence[str]) -> None:
    """Start the session and become the plugin."""
    settings = json.loads(argv[0])
    port = {"portNumber": [str(settings.pop("port"))]}
    wanted: Json = {"Target": settings.pop("instance"), "DocumentName": _DOCUMENT, "Parameters": port}
    credentials = Credentials(**settings)
    try:
        require_plugin()
        answer, endpoint = asyncio.run(_start(credentials, wanted))
    except SkywardError as error:
        raise SystemExit(str(error)) from error
    profile = credentials.profile or ""
    arguments = [PLUGIN, _ANSWER_VARIABLE, credentials.region, "StartSession", profile, json.dumps(wanted), endpoint]
    os.execvpe(PLUGIN, arguments, {**os.environ, _ANSWER_VARIABLE: answer})  # noqa: S606 - the plugin replaces this process


async def _start(credentials: Credentials, wanted: Json) -> tuple[str, str]:
    api = Api(credentials=credentials, patience_s=_PATIENCE_S)
    answer = await api.call("ssm", "StartSession", **wanted)
    session = {name: answer[name] for name in ("SessionId", "TokenValue", "StreamUrl")}
    return json.dumps(session), await api.endpoint("ssm")


if __name__ == "__main__":
    main(sys.argv[1:])
