"""Program that lists and reads files of a node's working folder, as ordered on standard input.

Its source is sent to the node's Python, without Skyward: it starts for each piece of a file. It needs nothing but the
standard library.
"""

import base64
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_THERE = 20
_ODD_KINDS = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def listing(folder: str, patterns: list[str]) -> dict[str, Any]:
    """Return what patterns match, with everything below matched folders; and the names of others if nothing matches.

    ``files`` maps regular files to their facts, ``folders`` maps folders to their modes, also those above a match.
    ``links`` maps links to the names they lead to, which are listed too or do not exist; a link to anything else in the
    folder is listed as the file or folder it leads to. ``left_out`` maps the rest to the reason.
    """
    selection = _Selection(os.path.realpath(folder))
    matched = {pattern: selection.add_matches(pattern) for pattern in patterns}
    selection.resolve_links()
    selection.add_parents()
    files, folders, links = selection.files, selection.folders, selection.links
    listed = {*files, *folders, *links}
    unmatched = [pattern for pattern, names in matched.items() if listed.isdisjoint(names)]
    there = sorted(os.listdir(folder)) if unmatched and os.path.isdir(folder) else []
    return {
        "files": files,
        "folders": folders,
        "links": links,
        "left_out": selection.left_out,
        "unmatched": unmatched,
        "there": there[:_THERE],
        "all": len(there),
    }


def piece(folder: str, name: str, offset: int, length: int, facts: list[int]) -> dict[str, Any]:
    """Return a piece of a file in base64, or that it is no longer the file with these facts."""
    top = os.path.realpath(folder)
    real = os.path.realpath(os.path.join(top, name))
    if not _is_below(real, top):
        return {"changed": True}
    try:
        # Not blocking: a named pipe may have taken the file's place.
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            before = _facts(os.fstat(descriptor))
            data = _read(descriptor, length, offset) if before == facts else b""
        finally:
            os.close(descriptor)
        after = _facts(os.stat(real))
    except (FileNotFoundError, NotADirectoryError):
        return {"changed": True}
    if before != facts or after != facts or len(data) != length:
        return {"changed": True}
    return {"data": base64.b64encode(data).decode()}


class _Selection:
    """Files, folders and links below ``top``, by their names there."""

    def __init__(self, top: str) -> None:
        self.files: dict[str, list[int]] = {}
        self.folders: dict[str, int] = {}
        self.links: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self._top = top
        self._places: dict[str, str] = {}
        self._unresolved: list[str] = []

    def add_matches(self, pattern: str) -> list[str]:
        """Add what a pattern matches, and return its names; hidden ones only if the pattern names one."""
        hidden = any(part.startswith(".") for part in pattern.split("/"))
        names: list[str] = []
        for match in sorted(path.relative_to(self._top) for path in Path(self._top).glob(pattern)):
            if hidden or not any(part.startswith(".") for part in match.parts):
                names.append(str(match))
                if not os.path.islink(self._path(str(match))):
                    names += self._below(str(match))
        for name in names:
            self._add(name)
        return names

    def resolve_links(self) -> None:
        """Keep links to what is listed, or does not exist; list what others lead to in their place."""
        while self._unresolved:
            name = self._unresolved.pop(0)
            path = self._path(name)
            real = os.path.realpath(path)
            if real in self._places or not os.path.lexists(real):
                self.links[name] = os.path.relpath(real, self._top)
            elif _is_below(os.path.realpath(os.path.dirname(path)), real):
                self.left_out[name] = "a link to a folder that it is in"
            else:
                self._add(name, follow=True)
                for each in self._below(name):
                    self._add(each)

    def add_parents(self) -> None:
        """Add the folders above each name."""
        for name in (*self.files, *self.folders, *self.links):
            for parent in map(str, Path(name).parents):
                self.folders[parent] = _mode(os.stat(self._path(parent)))
                self.links.pop(parent, None)
        self.folders.pop(".", None)

    def _add(self, name: str, *, follow: bool = False) -> None:
        path = self._path(name)
        real = os.path.realpath(path)
        try:
            seen = os.stat(path) if follow else os.lstat(path)
        except FileNotFoundError:  # gone by now
            return
        except OSError as error:
            self.left_out[name] = str(error.strerror)
            return
        if not _is_below(real, self._top):
            self.left_out[name] = f"leads to {real}, out of the folder"
        elif stat.S_ISLNK(seen.st_mode):
            self._unresolved.append(name)
        elif stat.S_ISDIR(seen.st_mode):
            self.folders[name] = _mode(seen)
            self._places.setdefault(real, name)
        elif facts := _facts(seen):
            self.files[name] = facts
            self._places.setdefault(real, name)
        else:
            self.left_out[name] = _ODD_KINDS.get(stat.S_IFMT(seen.st_mode), "no regular file")

    def _below(self, match: str) -> Iterator[str]:
        """Yield the names below a folder, which may be a link; links below it are not followed."""

        def note(error: OSError) -> None:
            self.left_out[os.path.relpath(error.filename, self._top)] = f"cannot be read: {error.strerror}"

        path = self._path(match)
        for here, folders, names in os.walk(path, onerror=note) if os.path.isdir(path) else ():
            folders.sort()
            for name in sorted((*folders, *names)):
                yield os.path.relpath(os.path.join(here, name), self._top)

    def _path(self, name: str) -> str:
        return os.path.join(self._top, name)


def _read(descriptor: int, length: int, offset: int) -> bytes:
    data = bytearray()
    while part := os.pread(descriptor, length - len(data), offset + len(data)):
        data += part
    return bytes(data)


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath((folder, path)) == folder


def _mode(seen: os.stat_result) -> int:
    """Return the permissions, without those to run as the owner or the group, and without the sticky bit."""
    return seen.st_mode & 0o777


def _facts(seen: os.stat_result) -> "list[int] | None":
    """Return size, time of change, inode and mode of a regular file."""
    return [seen.st_size, seen.st_mtime_ns, seen.st_ino, _mode(seen)] if stat.S_ISREG(seen.st_mode) else None


def main() -> None:
    """Answer the order on standard input with JSON on standard output."""
    order = json.load(sys.stdin)
    answer = {"listing": listing, "piece": piece}[order.pop("verb")](**order)
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
