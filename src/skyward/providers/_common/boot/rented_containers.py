"""Life of containers that a provider rents out: rented machines that end with their own key."""

from __future__ import annotations

from typing import ClassVar

from skyward.providers._common.boot.container_boot import END_COMMAND, MAY_END_COMMAND
from skyward.providers._common.rented_machines import RentedMachines

__all__ = ["RentedContainers"]


class RentedContainers(RentedMachines):
    """Base of providers of containers; see :class:`~skyward.providers._common.rented_machines.RentedMachines`.

    :class:`~skyward.providers._common.boot.container_boot.ContainerBoot` starts them. They are islands, on hosts that
    run those of strangers, too.
    """

    bind: ClassVar[str] = "127.0.0.1"
    boot_s: ClassVar[float] = 60.0
    """Time for which a container may refuse the first login: its sshd starts with the list of keys in place."""

    @property
    def ends_itself(self) -> bool:
        """True, as far as a container's own check confirms it."""
        return True

    def end_command(self, key: str) -> tuple[str, ...]:  # noqa: ARG002 - it is the same in every container
        """Return the command by which a container ends itself."""
        return END_COMMAND

    def end_check(self, key: str) -> tuple[str, ...]:  # noqa: ARG002 - it is the same in every container
        """Return the command that reports whether a container's key was accepted."""
        return MAY_END_COMMAND
