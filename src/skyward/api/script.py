"""Scripts as jobs: a script goes to a node with its project's files, and runs there as a program."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import platformdirs

from skyward.errors import ConfigurationError
from skyward.request.includes import bytes_of, files_below, pack_files
from skyward.submission import Invocation

_HEADER: Final = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
"""Block of inline metadata, as PEP 723 has it."""
_PROJECT_MARKS: Final = ("pyproject.toml", "setup.py", "setup.cfg", ".git")
_PROJECT_BYTES: Final = 200 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script with its project, as it goes to a node.

    Attributes:
        name: path of the script in the archive; its first part is the project's folder.
        folder: path of the folder there in which it begins, if that is not the project's.
        arguments: its arguments.
        project: the project's folder here.
        has_header: whether it states its own requirements (PEP 723).
        archive: the project's files, as a compressed tar archive.
    """

    name: str
    folder: str
    project: str
    arguments: tuple[str, ...] = ()
    has_header: bool = False
    archive: bytes = field(repr=False)


def read_script(path: Path, arguments: Sequence[str] = ()) -> Script:
    """Return a script with the files of its project: of the nearest folder above it that has a project's mark.

    What git ignores, environments and caches stay here; without a mark only the script's own folder goes.

    Raises:
        ConfigurationError: there is no such file, its header is wrong, or the project is too large.
    """
    script = path.resolve()
    if not script.is_file():
        raise ConfigurationError(f"script: there is no file {path}")
    header = script_header(script.read_text(encoding="utf-8", errors="replace"), str(path))
    project = project_of(script)
    if project == Path.home().resolve() or _state_folder().is_relative_to(project):
        raise ConfigurationError(
            f"script: all of {project} would go along with {path}, keys of fleets included: put the script into a "
            "folder of its own; that of a project has a pyproject.toml, or is a git repository"
        )
    files = files_below(project)
    size = bytes_of(files)
    if size > _PROJECT_BYTES:
        raise ConfigurationError(
            f"script: its project {project} has {size >> 20} MiB of files, more than the {_PROJECT_BYTES >> 20} MiB "
            "that go along; put data into a volume, or have git ignore it (.gitignore)"
        )
    archive = io.BytesIO()
    pack_files(files, archive)
    here = Path.cwd().resolve()
    return Script(
        name=_inside(project, script),
        folder=_inside(project, here if here.is_relative_to(project) else project),
        project=str(project),
        arguments=tuple(arguments),
        has_header=header is not None,
        archive=archive.getvalue(),
    )


def _state_folder() -> Path:
    return platformdirs.user_state_path("skyward").resolve()


def _inside(project: Path, path: Path) -> str:
    return (Path(project.name) / path.relative_to(project)).as_posix()


def project_of(script: Path) -> Path:
    """Return the folder that goes along with a script."""
    home = Path.home().resolve()
    for folder in script.parents:
        if folder in (home, folder.parent):  # not all that a user has
            break
        if any((folder / mark).exists() for mark in _PROJECT_MARKS):
            return folder
    return script.parent


def script_header(text: str, name: str) -> dict[str, Any] | None:
    """Return a script's inline metadata (PEP 723); None if it has none.

    Raises:
        ConfigurationError: it has two, or one that is no TOML.
    """
    blocks = [match for match in _HEADER.finditer(text) if match["type"] == "script"]
    if not blocks:
        return None
    if len(blocks) > 1:
        raise ConfigurationError(f"script: {name} has {len(blocks)} blocks `# /// script`, of which only one may be")
    lines = (line.removeprefix("# ").removeprefix("#") for line in blocks[0]["content"].splitlines())
    try:
        header = tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"script: the block `# /// script` of {name} is no TOML: {error}") from error
    if not isinstance(header.get("dependencies", []), list):
        raise ConfigurationError(f"script: dependencies in the block `# /// script` of {name} must be a list")
    return header


def script_invocation(script: Script, job: str, *, retries: int = 0) -> Invocation:
    """Return the call that runs a script on a node."""
    return Invocation(fn=run_script, args=(script, job), label=Path(script.name).name, retries=retries)


def run_script(script: Script, job: str) -> int:
    """Run a script on this node, and return its exit code, which is 0.

    Its project is unpacked into a folder of the job's name in the working folder of calls, where it stays.

    Raises:
        CalledProcessError: it ended with another exit code, or by a signal.
        FileNotFoundError: it states its requirements, and the node has no uv.
    """
    folder = Path.cwd() / job
    with tarfile.open(fileobj=io.BytesIO(script.archive), mode="r:gz") as archive:
        archive.extraction_filter = lambda member, _path: member
        archive.extractall(folder)  # noqa: S202 - it is the user's own
    project = folder / script.name.partition("/")[0]
    program = [find_uv(), "run", "--quiet", "--script"] if script.has_header else [sys.executable]
    found = [str(place) for place in (project, project / "src") if place.is_dir()]
    if not script.has_header:
        found += filter(None, [os.environ.get("PYTHONPATH")])
    command = [str(folder / script.name), *script.arguments]
    done = subprocess.run(
        [*program, *command],
        cwd=folder / script.folder,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(found)},
        check=False,
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command)
    return 0


def find_uv() -> str:
    """Return the path of uv on this node.

    Raises:
        FileNotFoundError: it has none.
    """
    root = Path(sys.prefix).parents[1]  # where a node's environments and its own uv are
    places = [Path.home() / ".local/bin/uv", Path.home() / ".cargo/bin/uv", root / "uv/bin/uv", root / "sent/uv"]
    with_package = [Path(sys.executable).with_name("uv")]
    if (uv := shutil.which("uv")) is not None:
        return uv
    for place in (*with_package, *places):
        if os.access(place, os.X_OK):
            return str(place)
    raise FileNotFoundError(
        "the script states its own requirements (`# /// script`), which uv installs, and this node has no uv: add it "
        'to the pool\'s image, Image(pip=["uv"])'
    )
