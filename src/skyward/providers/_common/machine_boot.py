"""Orders by which a rented machine starts, is reached, and ends itself (pure)."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from skyward.errors import ConfigurationError
from skyward.providers._common.logins import KeyPair
from skyward.providers.base import MachineSecret
from skyward.request.checks import refusal, text

GRACE_S: Final = 120.0
"""Time for the node to end by itself first, report that, and write changed files back to volumes."""

POWER_OFF: Final = ("shutdown", "-h", "now")

_CLOUD_FOLDER: Final = "/var/lib/cloud/instance"
"""Folder of cloud-init; a machine made from this one's disk has another."""
_OWN_FOLDER: Final = "/var/lib/skyward"
_UNIT: Final = "/etc/systemd/system/skyward-boot.service"

# This early in the boot systemd accepts a timer, but `shutdown` does not reach logind. A timer also admits logins until
# the end, while a scheduled `shutdown` refuses them for its last minutes.
_SCRIPT: Final = """\
life=@seconds
kept=@folder/skyward-ends-at
now=$(date +%s)
ends=$(cat "$kept" 2>/dev/null)
case $ends in
"" | *[!0-9]*) ends=$((now + life)) ;;
esac
left=$((ends - now))
[ "$left" -le "$life" ] || left=$life
[ "$left" -ge 1 ] || left=1
systemd-run --no-block --unit=skyward-time-to-live --timer-property=DefaultDependencies=no \\
    --on-active="$left" @end || shutdown -h "+$(((left + 59) / 60))"
echo "$ends" >"$kept.new" && mv "$kept.new" "$kept" && sync
"""

_INSTALL: Final = """\
mkdir -p @folder
rm -f @folder/skyward-ends-at
cat >@folder/at-boot <<'END_OF_AT_BOOT'
@scriptEND_OF_AT_BOOT
cat >@unit <<'END_OF_UNIT'
[Service]
Type=oneshot
ExecStart=/bin/sh @folder/at-boot
[Install]
WantedBy=multi-user.target
END_OF_UNIT
systemctl enable skyward-boot.service
sh @folder/at-boot
"""

_HOST_KEY: Final = """\
rm -f /etc/ssh/ssh_host_*_key /etc/ssh/ssh_host_*_key.pub
cat >/etc/ssh/ssh_host_ed25519_key <<'END_OF_KEY'
@privateEND_OF_KEY
echo '@public' >/etc/ssh/ssh_host_ed25519_key.pub
systemctl restart ssh || systemctl restart sshd
"""


def cloud_config(
    *, host_key: KeyPair, user_key: str, time_to_live_s: float, root: bool = False, end: Sequence[str] = POWER_OFF
) -> str:
    """Return one machine's cloud-config, as JSON: that is YAML with everything quoted.

    Args:
        host_key: the machine's only host key.
        user_key: the public key that it admits.
        time_to_live_s: the machine shuts itself down so long after its first boot, plus two minutes for the node to
            end by itself. Armed before everything else; reboots do not extend it.
        root: True to admit the key as root, too; False admits it as the image's own user only.
        end: command that ends the machine.
    """
    config: dict[str, Any] = {
        "bootcmd": [["sh", "-c", time_to_live(time_to_live_s, end=end)]],
        "ssh_deletekeys": True,
        "ssh_genkeytypes": [],
        "ssh_keys": {"ed25519_private": host_key.private, "ed25519_public": host_key.public},
        "ssh_authorized_keys": [user_key],
        "disable_root": not root,
        "ssh_pwauth": False,
    }
    return "#cloud-config\n" + json.dumps(config, indent=1)


def time_to_live(seconds: float, *, end: Sequence[str] = POWER_OFF, folder: str = _CLOUD_FOLDER) -> str:
    """Return the shell script that arms the machine's end; to be run at every boot.

    The moment is chosen at the first boot and stored in ``folder``, so that a reboot does not postpone it. It is
    measured by the machine's own clock. If that clock was set back meanwhile, no boot arms more than the whole time. A
    machine that cannot store the moment arms the whole time at each boot.

    Args:
        seconds: time from the first boot; :data:`GRACE_S` is added.
        end: command that ends the machine.
        folder: folder that outlives reboots.
    """
    whole = math.ceil(seconds + GRACE_S)
    return _filled(_SCRIPT, seconds=str(whole), folder=folder, end=shlex.join(end))


def time_to_live_unit(seconds: float, *, end: Sequence[str] = POWER_OFF) -> str:
    """Return the shell script that arms the machine's end at every boot; to be run once, as root, at the first.

    For machines whose orders are a script that only the first boot runs. It makes a unit of systemd that runs
    :func:`time_to_live` at later boots. The arguments are those of :func:`time_to_live`.
    """
    script = time_to_live(seconds, end=end, folder=_OWN_FOLDER)
    return _filled(_INSTALL, folder=_OWN_FOLDER, unit=_UNIT, script=script)


def boot_script(*, host_key: KeyPair, time_to_live_s: float, end: Sequence[str] = POWER_OFF, first: str = "") -> str:
    """Return the script for a machine that runs one, once, as root, at its first boot.

    Until it has run, the machine shows the host key of its image.

    Args:
        host_key: the machine's only host key.
        time_to_live_s: see :func:`time_to_live`.
        end: see there.
        first: shell commands that run before everything else.
    """
    keys = _filled(_HOST_KEY, private=host_key.private, public=host_key.public)
    return f"#!/bin/sh\numask 077\n{first}{time_to_live_unit(time_to_live_s, end=end)}{keys}"


def _filled(text: str, **values: str) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}", value)
    return text


# curl reads the token from its standard input: every process can read the arguments of all others.
_DELETE_SCRIPT: Final = """\
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


def delete_script(url: str, token: str) -> str:
    """Return the shell script that sends ``DELETE`` to ``url``, with a bearer token, and powers off without success."""
    header = json.dumps(f"Authorization: Bearer {token}")
    return _filled(_DELETE_SCRIPT, header=header, url=json.dumps(url)) + shlex.join(POWER_OFF) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfDestruct:
    """Program on a machine that ends the machine and its bill, in a file with mode 0600.

    Attributes:
        path: its path.
        interpreter: the program that runs it.
    """

    path: str
    interpreter: str = "sh"

    @property
    def command(self) -> tuple[str, ...]:
        """Command that ends the machine. It returns at once."""
        return detached(self.interpreter, self.path)

    @property
    def end(self) -> tuple[str, ...]:
        """Command that ends the machine, for a timer; a machine that never got the program is switched off."""
        return ("sh", "-c", f"{shlex.join((self.interpreter, self.path))} || {shlex.join(POWER_OFF)}")

    def delivery(
        self, program: str, *, renewal: str = "", stale_s: int = 0, renewed_s: float = math.inf
    ) -> MachineSecret:
        """Return the command that takes the program, in place of a former one.

        Args:
            program: its source, with the secret.
            renewal: name of this delivery. A scheduled run gets it as argument, and has to end at once if the present
                program is another delivery's.
            stale_s: time after which the machine ends unless a newer program has come; 0 for never.
            renewed_s: time after which a newer one is delivered.
        """
        schedule = ("systemd-run", "--no-block", f"--on-active={stale_s}", self.interpreter, self.path, renewal)
        command = f"{store(self.path)} && {shlex.join(schedule)}" if stale_s else store(self.path)
        return MachineSecret(command=("sh", "-c", command), value=program, renewed_s=renewed_s)


def first_delivery(secret: MachineSecret) -> str:
    """Return shell commands for a first-boot script that deliver a secret."""
    return f"{shlex.join(secret.command)} <<'END_OF_SECRET'\n{secret.value}END_OF_SECRET\n"


_CONTAINER_SCRIPT: Final = Path(__file__).with_name("container_boot.sh")
_FOLDER: Final = "/var/lib/skyward"

END_COMMAND: Final = ("sh", f"{_FOLDER}/end")
"""Command on a container that ends it, within seconds, and returns at once."""
MAY_END_COMMAND: Final = ("sh", f"{_FOLDER}/may-end.sh")
"""Command on a container that exits with 0 if its check call was accepted, else prints the reason."""
SECRET_FILE: Final = f"{_FOLDER}/secret"
"""File on a container whose content is ``${SKYWARD_SECRET}`` in its calls, once it is there."""

_VARIABLE: Final = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")
_EVERY_S: Final = 5
_UNSUPERVISED_S: Final = 120
"""Time after which a container whose supervisor is gone ends."""
_UNATTENDED_S: Final = 1800
"""Time after which one that has never had a supervisor ends, unless its client is connected."""

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
    "most_absences": str(_UNSUPERVISED_S // _EVERY_S),
    "most_unattended": str(_UNATTENDED_S // _EVERY_S),
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
            "end_calls": " ".join(calls),
            "probed": "yes" if self.probe else "",
            **self.facts,
        }
        lines = [f"{name}={shlex.quote(value)}\n" for name, value in facts.items()]
        calls |= {"call_check": self.check}
        if self.probe is not None:
            calls |= {f"call_{each.name}": getattr(self.probe, each.name) for each in fields(self.probe)}
        functions = [call.function(name) for name, call in calls.items()]
        return "#!/bin/sh\n" + "".join([*lines, *functions]) + _CONTAINER_SCRIPT.read_text(encoding="utf-8")

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


GPU_IMAGE: Final = "nvidia/cuda:12.4.1-base-ubuntu22.04"
"""Small official image with CUDA, which newer drivers run as well."""
CPU_IMAGE: Final = "ubuntu:24.04"
"""Small official image without CUDA."""

_NAME: Final = re.compile(
    r"\w[\w.-]*(:\d+)?(/[\w.-]+)*(:\w[\w.-]*|:@[\w-]+)?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_PRIVATE: Final = re.compile(r"\d{12}\.dkr\.ecr\.|[\w-]+\.azurecr\.io/", re.ASCII)
"""Registries that admit nobody without credentials."""
_NEEDS_GB: Final[Mapping[str, int]] = {
    r"\w/pytorch\b": 20,
    r"nvcr\.io/nvidia/|vllm/vllm-openai": 30,
    r"tensorflow/tensorflow|^nvidia/cuda.*-devel": 15,
}
"""Disk for well-known images, with room for an environment."""


def checked_image(
    image: object,
    *,
    disk: str,
    disk_gb: int,
    login: str | None = None,
    remedy: str = "pass image_login with its credentials",
) -> str:
    """Return ``image`` if it may be a container image that fits on its disk and can be read.

    Args:
        image: the image's name.
        disk: name of the parameter for the disk's size.
        disk_gb: size of the disk.
        login: credentials for the registry; None for none.
        remedy: next step for an image that needs some.

    Raises:
        ConfigurationError: it is none, does not fit, or is in a registry that needs credentials.
    """
    name = text("image", image)
    if not _NAME.fullmatch(name):
        raise refusal("image", "the name of a container image such as 'ubuntu:24.04'", name)
    if _PRIVATE.match(name) and login is None:
        raise ConfigurationError(f"image={name!r} is in a private registry: {remedy}")
    for pattern, needs_gb in _NEEDS_GB.items():
        if re.search(pattern, name) and disk_gb < needs_gb:
            raise refusal(disk, f"at least {needs_gb} for the image {name}", disk_gb)
    return name


def cuda_of(image: str) -> float | None:
    """Return the version of CUDA that an image's name states: ``12.4``; None if it states none."""
    found = re.search(r"cuda:?(\d+\.\d+)", image)
    return None if found is None else float(found[1])
