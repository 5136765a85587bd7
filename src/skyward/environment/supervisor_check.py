"""Check on a machine whether a node's supervisor runs there."""

from __future__ import annotations

from typing import Final

from skyward.environment.bootstrap import Environment

SUPERVISOR_GONE: Final = 99
"""Exit status of the check for a supervisor when there is none. Others, except 0, are no verdict."""
# The environment besides the pid: another process may have the pid by now, above all after a reboot. A zombie's
# environment is empty. The verdict has an exit status of its own, because on a machine without free memory or processes
# this check fails in other ways while the supervisor may run.
IS_THERE: Final = f"""
import os, sys
environment = f"/proc/{{sys.argv[1]}}/environ"
try:
    os.kill(int(sys.argv[1]), 0)
    if os.path.exists(environment):
        with open(environment, "rb") as file:
            if f"SKYWARD_INSTANCE={{sys.argv[2]}}".encode() not in file.read().split(b"\\0"):
                sys.exit({SUPERVISOR_GONE})
except (ProcessLookupError, PermissionError, FileNotFoundError):
    sys.exit({SUPERVISOR_GONE})
"""
UNLESS_WIPED: Final = f'[ -e "$1" ] || exit {SUPERVISOR_GONE}; exec "$@"'


def supervisor_check(environment: Environment, pid: int, instance_id: str, *, may_be_wiped: bool) -> list[str]:
    """Return the command that ends with :data:`SUPERVISOR_GONE` if the node's supervisor is gone, with 0 if it runs.

    Args:
        environment: the node's.
        pid: the supervisor's process id.
        instance_id: the provider's id of the machine.
        may_be_wiped: True if the machine may have lost its files, as a container that restarts.
    """
    check = environment.command("-c", IS_THERE, str(pid), instance_id)
    return ["sh", "-c", UNLESS_WIPED, "sh", *check] if may_be_wiped else check
