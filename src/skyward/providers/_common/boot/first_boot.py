"""A machine's first boot: its keys and its end, as a cloud-config or as a shell script (pure)."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from typing import Any, Final

from skyward.providers._common.ssh_keys import KeyPair

__all__ = ["GRACE_S", "POWER_OFF", "boot_script", "cloud_config", "time_to_live", "time_to_live_unit"]

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
