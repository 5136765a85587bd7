"""Start of a rented container: its sshd, and a loop that ends it through its provider's API (pure)."""

from __future__ import annotations

import base64
import gzip
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from skyward.providers._common.boot.first_boot import GRACE_S
from skyward.providers._common.ssh_keys import KeyPair

__all__ = ["END_COMMAND", "MAY_END_COMMAND", "SECRET_FILE", "ContainerBoot", "EndProbe", "HttpCall"]

_SCRIPT: Final = Path(__file__).with_name("boot.sh")
_FOLDER: Final = "/var/lib/skyward"

END_COMMAND: Final = ("sh", f"{_FOLDER}/end")
"""Command on a container that ends it, within seconds, and returns at once."""
MAY_END_COMMAND: Final = ("sh", f"{_FOLDER}/may-end.sh")
"""Command on a container that exits with 0 if its check call was accepted, else prints the reason."""
SECRET_FILE: Final = f"{_FOLDER}/secret"
"""File on a container whose content is ``${SKYWARD_SECRET}`` in its calls, once it is there."""

_VARIABLE: Final = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")
_EVERY_S: Final = 5

_FACTS: Final[Mapping[str, str]] = {
    "folder": _FOLDER,
    "sshd_paths": "/usr/sbin/sshd /usr/local/sbin/sshd /usr/bin/sshd",
    "sshd_options": "",
    "empty_folder": "/run/sshd",
    "shadow": "/etc/shadow",
    "policy": "/usr/sbin/policy-rc.d",
    "supervisor": r"skyward[.]node[.]supervisor",
    "connections": "/proc/net/tcp",
    "every_s": str(_EVERY_S),
    "again_s": "30",
    "accepted_s": "300",
    "answer_s": "60",
    "skew_s": "300",
}
"""Places, and seconds between two attempts, in production."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpCall:
    """Call of a provider's API, made on a container. Texts may name variables of the container: ``${NAME}``.

    A call with a variable that the container lacks is not made.

    Attributes:
        method: the HTTP method.
        url: the URL.
        headers: lines ``"Name: value"``; the only place for a key.
        body: the body; empty for none.
        refusal: text, without blanks, that makes an answer a refusal whose status is one of success; empty for none.
    """

    method: str
    url: str
    headers: tuple[str, ...] = ()
    body: str = ""
    refusal: str = ""

    def function(self, name: str) -> str:
        """Return the shell function of that name that assigns this call's parts."""
        headers = "\n".join((*self.headers, *(["Content-Type: application/json"] if self.body else [])))
        parts = {"method": self.method, "url": self.url, "headers": headers, "body": self.body, "refusal": self.refusal}
        needs = " ".join(dict.fromkeys(_VARIABLE.findall(" ".join((self.url, *self.headers, self.body)))))
        lines = [f"    {part}={_expanded(text)}" for part, text in parts.items()]
        return "\n".join([f"{name}() {{", *lines, f"    needs={shlex.quote(needs)}", "}", ""])


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProbe:
    """Calls that show whether a key may end a container, where it is refused the check; none changes anything.

    Attributes:
        absent_check: the check, of a container that does not exist.
        absent_end: the end of that container.
        read: a call that reads this container.
    """

    absent_check: HttpCall
    absent_end: HttpCall
    read: HttpCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerBoot:
    """Orders of one container.

    Its script may be restarted at any time. It needs a shell, and root; it installs sshd and curl where they are
    missing. It ends the container at its deadline, once its supervisor was there and is gone, and by
    :data:`END_COMMAND`.

    Attributes:
        host_key: the only host key of its sshd.
        user_key: the public key that it admits.
        port: port of its sshd.
        made_at: Unix time of its creation, by this machine's clock.
        ends_at: Unix time of its deadline; two minutes are added for the node to end by itself.
        end: calls that end the container, tried in turn until one is accepted.
        check: harmless call with the same key; it shows whether ``end`` is permitted.
        probe: further ones, where a key that is refused ``check`` may be allowed the end.
        unsupervised_s: time after which a container whose supervisor is gone ends.
        unattended_s: time after which one that has never had a supervisor ends, unless its client is connected.
        facts: other values for variables of the script; for tests.
    """

    host_key: KeyPair
    user_key: str
    port: int
    made_at: int
    ends_at: int
    end: Sequence[HttpCall]
    check: HttpCall
    probe: EndProbe | None = None
    unsupervised_s: int = 120
    unattended_s: int = 1800
    facts: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def script(self) -> str:
        """The script with its facts. It holds the private half of the host key."""
        calls = {f"call_{number}": call for number, call in enumerate(self.end, start=1)}
        facts = {
            **_FACTS,
            "host_key": self.host_key.private.strip(),
            "user_key": self.user_key,
            "port": str(self.port),
            "made_at": str(self.made_at),
            "ends_at": str(int(self.ends_at + GRACE_S)),
            "most_absences": str(self.unsupervised_s // _EVERY_S),
            "most_unattended": str(self.unattended_s // _EVERY_S),
            "end_calls": " ".join(calls),
            "probed": "yes" if self.probe else "",
            **self.facts,
        }
        lines = [f"{name}={shlex.quote(value)}\n" for name, value in facts.items()]
        calls |= {"call_check": self.check}
        if self.probe is not None:
            calls |= {f"call_{each.name}": getattr(self.probe, each.name) for each in fields(self.probe)}
        functions = [call.function(name) for name, call in calls.items()]
        return "#!/bin/sh\n" + "".join([*lines, *functions]) + _SCRIPT.read_text(encoding="utf-8")

    @property
    def variable(self) -> dict[str, str]:
        """Environment variable of the container that holds the script."""
        packed = gzip.compress(self.script.encode(), mtime=0)
        return {"SKYWARD_BOOT": base64.b64encode(packed).decode("ascii")}

    @property
    def arguments(self) -> tuple[str, ...]:
        """Command that unpacks the script and becomes it."""
        folder = self.facts.get("folder", _FOLDER)
        unpack = f"umask 077;mkdir -p {folder};echo $SKYWARD_BOOT|base64 -d|gzip -dc>{folder}/new"
        # After a restart on a full disk the former text runs. No blank, quote or backslash: it does not matter then how
        # a provider splits one text into arguments.
        run = f"mv {folder}/new {folder}/boot.sh;exec sh {folder}/boot.sh"
        return ("sh", "-c", f"{unpack}&&{run}".replace(" ", "${IFS}"))

    @property
    def command(self) -> str:
        """The command as one text."""
        return " ".join(self.arguments)


def _expanded(text: str) -> str:
    """Return ``text`` in double quotes for a shell, which replaces nothing but named variables."""
    parts = _VARIABLE.split(text)
    quoted = [re.sub(r'([\\"`$])', r"\\\1", each) for each in parts[::2]]
    names = [f"${{{name}-}}" for name in parts[1::2]] + [""]
    return '"' + "".join(text for pair in zip(quoted, names, strict=True) for text in pair) + '"'
