"""Names of the reference that inline code stands for."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from skyward.cli import main

PACKAGES = (
    "skyward",
    "skyward.events",
    "skyward.integrations",
    "skyward.providers",
    "skyward.request.request",
    "skyward_dask",
    "skyward_joblib",
)
"""Modules under which the reference has names, in order of preference."""

OBJECTS = {"pool": "ComputePool", "image": "Image", "cluster": "skyward_dask.SkywardCluster"}
"""Names that the pages' programs give to objects of these classes."""

CODE = re.compile(r"@?([A-Za-z_][\w.]*?)(?:\(.*\))?", re.DOTALL)
MAKER = re.compile(r"^(?:skyward\.)?(?:Accelerator\.(?:NVIDIA|AWS|Google|AMD)|NVIDIA)\.")
MODULES = {"accelerators", "distributed", "errors", "integrations"}  # as plain words: other things, or everyday terms


def documented(code: str, known: Container[str]) -> str | None:
    """Return the entry of ``known`` that inline code such as ``pool.submit(fn)`` names; None if it names none."""
    match = CODE.fullmatch(code.strip())
    if match is None or match[1] in MODULES:
        return None
    code = MAKER.sub("skyward.accelerators.", re.sub(r"^sky\.", "skyward.", match[1]))
    first, dot, rest = code.partition(".")
    written = f"{OBJECTS[first]}.{rest}" if dot and first in OBJECTS else code
    return next((each for each in candidates(written) if each in known), None)


def candidates(name: str) -> Iterator[str]:
    """Yield the names under which the reference may have ``name``: its own, then those of the public packages."""
    yield name
    parts = name.split(".")
    for length in (1, 2):
        for package in PACKAGES:
            if parts[0].startswith("skyward") or len(parts) == length:
                yield ".".join((package, *parts[-length:]))


def command(code: str) -> str | None:
    """Return the anchor of the command that inline code such as ``skyward sweep --all`` names, if it exists."""
    words = code.split()
    return f"skyward-{words[1]}" if len(words) > 1 and words[0] == "skyward" and words[1] in main.commands else None
