"""Programs by which machines end their own bill when their client is dead, with a secret that is renewed (pure)."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skyward.providers._common.boot.delete_script import detached, store
from skyward.providers.registry import MachineSecret

__all__ = ["DeadMan", "first_delivery"]

_PLACE = "FACTS: dict[str, str] = {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadMan:
    """Program on a machine that deletes the machine.

    Each delivery schedules its run for the case that no newer one follows. A run gets the name of its delivery as
    argument, and has to end at once if ``FACTS["renewal"]`` of the present program is another.

    Attributes:
        program: path of its source here, for ``python3``, with the line ``FACTS: dict[str, str] = {}``.
        path: its path on the machine.
        stale_s: time after a delivery at which the client counts as dead.
    """

    program: Path
    path: str
    stale_s: int

    @property
    def command(self) -> tuple[str, ...]:
        """Command that ends the machine. It returns at once."""
        return detached("python3", self.path)

    @property
    def end(self) -> tuple[str, ...]:
        """Command that ends the machine, for a timer."""
        return ("python3", self.path)

    def delivery(self, facts: Mapping[str, str], secret: str, *, renewed_s: float) -> MachineSecret:
        """Return the program with these facts, and the command that takes it.

        Args:
            facts: values for the program, besides ``secret`` and ``renewal``.
            secret: the secret.
            renewed_s: time after which a newer one is delivered.
        """
        renewal = hashlib.sha256(secret.encode()).hexdigest()[:16]
        values = json.dumps({**facts, "secret": secret, "renewal": renewal})
        value = self.program.read_text(encoding="utf-8").replace(_PLACE, f"FACTS = {values}", 1)
        stale = f"systemd-run --no-block --on-active={self.stale_s} python3 {shlex.quote(self.path)} {renewal}"
        return MachineSecret(command=("sh", "-c", f"{store(self.path)} && {stale}"), value=value, renewed_s=renewed_s)


def first_delivery(secret: MachineSecret) -> str:
    """Return shell commands for a first-boot script that deliver a secret."""
    return f"{shlex.join(secret.command)} <<'END_OF_SECRET'\n{secret.value}END_OF_SECRET\n"
