"""What a machine is told at its first boot, as cloud-config (pure)."""

from __future__ import annotations

import json
import math

from skyward.errors import ConfigurationError
from skyward.providers.aws.keys import KeyPair

__all__ = ["LARGEST_BYTES", "user_data"]

LARGEST_BYTES = 16 * 1024
"""What EC2 takes, before it is encoded."""

_GRACE_S = 120.0
"""The node ends by itself first: it says so, and writes back what is to be kept."""

# So early systemd takes a timer, but `shutdown` finds nobody to tell; a timer leaves logins alone to the end.
_SCRIPT = """\
life=@seconds
kept=/var/lib/cloud/instance/skyward-ends-at
now=$(date +%s)
ends=$(cat "$kept" 2>/dev/null)
case $ends in
"" | *[!0-9]*) ends=$((now + life)) ;;
esac
left=$((ends - now))
[ "$left" -le "$life" ] || left=$life
[ "$left" -ge 1 ] || left=1
systemd-run --no-block --unit=skyward-time-to-live --timer-property=DefaultDependencies=no \\
    --on-active="$left" shutdown -h now || shutdown -h "+$(((left + 59) / 60))"
echo "$ends" >"$kept.new" && mv "$kept.new" "$kept" && sync
"""


def user_data(*, host_key: KeyPair, user_key: str, time_to_live_s: float) -> str:
    """The text for one machine; JSON is YAML, and quotes everything.

    Args:
        host_key: what the machine is to prove itself by; it has no other.
        user_key: the public key that it lets in.
        time_to_live_s: so long after its first boot, and two minutes for the node to end by itself, it shuts itself
            down, whatever else fails and however often it was rebooted; armed first.
    """
    config = {
        "bootcmd": [["sh", "-c", _time_to_live(time_to_live_s)]],
        "ssh_deletekeys": True,
        "ssh_genkeytypes": [],
        "ssh_keys": {"ed25519_private": host_key.private, "ed25519_public": host_key.public},
        "ssh_authorized_keys": [user_key],
        "disable_root": True,
        "ssh_pwauth": False,
    }
    text = "#cloud-config\n" + json.dumps(config, indent=1)
    if len(text.encode()) > LARGEST_BYTES:
        raise ConfigurationError(f"a machine's first orders may have {LARGEST_BYTES} bytes, not {len(text.encode())}")
    return text


def _time_to_live(seconds: float) -> str:
    """Return the shell script that arms the end, at every boot.

    The moment is chosen at the first boot and kept in cloud-init's folder of this very instance, so that a reboot puts
    nothing off. It is the machine's own clock that counts, not the client's; and if that was set back meanwhile, no
    boot arms more than the whole time. A machine that cannot keep the moment arms the whole time at each boot.
    """
    whole = math.ceil(seconds + _GRACE_S)
    return _SCRIPT.replace("@seconds", str(whole))
