"""Script by which a machine deletes itself at its provider, with a token that it gets over SSH (pure)."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Final

from skyward.providers._common.boot.first_boot import POWER_OFF
from skyward.providers.registry import MachineSecret

__all__ = ["DeleteScript", "detached", "store"]

# curl reads the token from its standard input: every process can read the arguments of all others.
_SCRIPT: Final = """\
# Delete this machine, and with it its bill. Without success for ten minutes, end at least the work on it.
for attempt in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    curl --silent --show-error --fail --max-time 20 --request DELETE --config - <<'END_OF_CONFIG' && exit 0
header = @header
url = @url
END_OF_CONFIG
    sleep 10
done
"""


def store(path: str) -> str:
    """Return the shell command that writes its standard input to a file with mode 0600, at once or not at all."""
    quoted = shlex.quote(path)
    return f'umask 077 && mkdir -p "$(dirname {quoted})" && cat >{quoted}.new && mv {quoted}.new {quoted}'


def detached(*command: str) -> tuple[str, ...]:
    """Return the command that starts another one and returns at once: a supervisor waits 30 s for its command."""
    return ("sh", "-c", f"nohup {shlex.join(command)} >/dev/null 2>&1 </dev/null &")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteScript:
    """The script on one machine, in a file with mode 0600.

    Attributes:
        path: its path.
    """

    path: str

    @property
    def command(self) -> tuple[str, ...]:
        """Command that deletes the machine. It returns at once."""
        return detached("sh", self.path)

    @property
    def end(self) -> tuple[str, ...]:
        """Command for the timer of a first boot; a machine that never got the script is switched off."""
        return ("sh", "-c", f"sh {shlex.quote(self.path)} || {shlex.join(POWER_OFF)}")

    def secret(self, url: str, token: str) -> MachineSecret:
        """Return the script that sends ``DELETE`` to ``url``, with a bearer token, and the command that takes it."""
        header = json.dumps(f"Authorization: Bearer {token}")
        script = _SCRIPT.replace("@header", header).replace("@url", json.dumps(url)) + shlex.join(POWER_OFF) + "\n"
        return MachineSecret(command=("sh", "-c", store(self.path)), value=script)
