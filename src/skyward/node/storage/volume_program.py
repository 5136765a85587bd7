"""The program that makes volumes available on a node and writes back what was changed: ``python -m ...node.volumes``.

It reads one :class:`VolumeOrder` from its standard input, where nobody else sees the keys in it, and prints one
:class:`VolumeAnswer`. When something fails: exit status 1, and the reason on standard error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from skyward.errors import SkywardError
from skyward.node.storage.mirror import Mirror
from skyward.node.storage.mount import can_mount, mount, unmount
from skyward.node.storage.mount_registry import Place, claimed, held
from skyward.providers.storage import store_kind
from skyward.request.volume import GrantedVolume

__all__ = ["LOG_FILE", "VolumeAnswer", "VolumeOrder", "main", "perform"]

log = logging.getLogger("skyward.node.storage.volume_program")

LOG_FILE = "volumes.log"
"""In the node's folder."""
_QUIET_S = 5.0
"""What was written to more recently may be half of what it will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeOrder:
    """What is to be done with a node's volumes. Secret.

    Attributes:
        verb: ``"fetch"`` makes them available; ``"push"`` writes back what was changed; ``"release"`` does so for the
            last time, and leaves nothing of them behind once no node uses them. All are idempotent.
        instance_id: the node's.
        workdir: the node's own folder.
        volumes: which ones.
    """

    verb: Literal["fetch", "push", "release"]
    instance_id: str
    workdir: str
    volumes: tuple[GrantedVolume, ...] = field(repr=False)

    def to_json(self) -> str:
        """The text for standard input."""
        return json.dumps(
            {
                "verb": self.verb,
                "instance_id": self.instance_id,
                "workdir": self.workdir,
                "volumes": [granted.to_dict() for granted in self.volumes],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> VolumeOrder:
        """Read it."""
        values = json.loads(text)
        return cls(**values | {"volumes": tuple(map(GrantedVolume.from_dict, values["volumes"]))})


@dataclass(frozen=True, slots=True, kw_only=True)
class VolumeAnswer:
    """What came of it.

    Attributes:
        notes: what the user should know.
    """

    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The text for standard output."""
        return json.dumps({"notes": self.notes})

    @classmethod
    def from_json(cls, text: str) -> VolumeAnswer:
        """Read it."""
        return cls(notes=tuple(json.loads(text)["notes"]))


def perform(order: VolumeOrder) -> VolumeAnswer:
    """Do what is ordered, for every volume although one fails.

    What was made for volumes that cannot be fetched is removed again. Raises Skyward's errors, or OSError: the first.
    """
    notes: list[str] = []
    errors: list[Exception] = []
    for number, granted in enumerate(order.volumes):
        key_file = Path(order.workdir, f"volume-{number}.key")
        try:
            match order.verb:
                case "fetch":
                    notes += _fetch(granted, order, key_file)
                case "push":
                    _push(granted)
                case "release":
                    _release(granted, order)
                    key_file.unlink(missing_ok=True)
        except (SkywardError, OSError) as error:
            log.error("%s (%s): %s", granted.volume.mount_path, granted.volume.location, error)
            error.add_note(f"volume {granted.volume.mount_path} ({granted.volume.location})")
            errors.append(error)
            if order.verb == "fetch":
                break
    if errors:
        if order.verb == "fetch":
            perform(replace(order, verb="release"))
        raise errors[0]
    return VolumeAnswer(notes=tuple(notes))


def _fetch(granted: GrantedVolume, order: VolumeOrder, key_file: Path) -> Sequence[str]:
    kind, folder = store_kind(granted.volume), Path(granted.volume.mount_path)
    with claimed(granted, order.instance_id, order.workdir) as place:
        if place.head.mounted and os.path.ismount(folder):
            return ()
        if granted.access.mountable and can_mount():
            place.head.mounted = mount(kind.mount_ways(granted, os.uname().machine), folder, key_file)
        if place.head.mounted:
            return ()
        return [f"{folder}: {note}" for note in _mirror(place, granted).fetch()]


def _push(granted: GrantedVolume) -> None:
    if granted.volume.read_only:
        return
    with held(granted) as place:
        if place is not None and not place.head.mounted:
            _mirror(place, granted).push(quiet_s=_QUIET_S)


def _release(granted: GrantedVolume, order: VolumeOrder) -> None:
    with held(granted) as place:
        if place is None or order.instance_id not in place.head.holders:
            return
        del place.head.holders[order.instance_id]
        in_use = place.used_by_others()
        place.save()
        if not (place.read_only or place.head.mounted):
            _mirror(place, granted).push(quiet_s=0.0)
        if in_use:
            return
        if place.head.mounted:
            unmount(place.folder)
        elif left := place.empty():
            log.warning("%s keeps files that are not in the store: %s", place.folder, ", ".join(left[:20]))
        place.close()


def _mirror(place: Place, granted: GrantedVolume) -> Mirror:
    return Mirror(place, lambda: store_kind(granted.volume).open_store(granted))


def main() -> None:
    """Do what standard input says."""
    order = VolumeOrder.from_json(sys.stdin.read())
    Path(order.workdir).mkdir(mode=0o700, parents=True, exist_ok=True)
    file = logging.FileHandler(Path(order.workdir, LOG_FILE), encoding="utf-8")
    logging.basicConfig(
        level=logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[file, logging.StreamHandler()],
    )
    logging.getLogger("skyward").setLevel(logging.INFO)
    try:
        answer = perform(order)
    except (SkywardError, OSError) as error:
        where = "".join(f"{note}: " for note in error.__notes__[:1])
        raise SystemExit(f"{where}{error}") from None
    sys.stdout.write(answer.to_json() + "\n")


if __name__ == "__main__":
    main()
