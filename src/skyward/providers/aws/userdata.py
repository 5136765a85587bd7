"""What a machine is told at its first boot, as cloud-config (pure)."""

from __future__ import annotations

import json
import math

from skyward.errors import ConfigurationError
from skyward.providers.aws.keys import KeyPair

__all__ = ["LARGEST_BYTES", "user_data"]

LARGEST_BYTES = 16 * 1024
"""What EC2 takes, before it is encoded."""

_SECONDS_PER_MINUTE = 60
_GRACE_S = 120.0
"""The node ends by itself first: it says so, and writes back what is to be kept."""


def user_data(*, host_key: KeyPair, user_key: str, time_to_live_s: float) -> str:
    """The text for one machine; JSON is YAML, and quotes everything.

    Args:
        host_key: what the machine is to prove itself by; it has no other.
        user_key: the public key that it lets in.
        time_to_live_s: after so long, and two minutes for the node to end by itself, it shuts itself down, whatever
            else fails; armed first.
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
    """So early systemd takes a timer, but `shutdown` finds nobody to tell; a timer leaves logins alone to the end."""
    seconds += _GRACE_S
    whole, minutes = math.ceil(seconds), math.ceil(seconds / _SECONDS_PER_MINUTE)
    timer = "systemd-run --no-block --unit=skyward-time-to-live --timer-property=DefaultDependencies=no"
    return f"{timer} --on-active={whole} shutdown -h now || shutdown -h +{minutes}"
