"""A place on the import path for installed distributions, and the only package index: a folder of wheels."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path

import pytest


class Site:
    """Distributions of a test, and the wheels that indexes have."""

    def __init__(self, folder: Path) -> None:
        self.installed = folder / "installed"
        self.wheels = folder / "wheels"
        self.installed.mkdir()
        self.wheels.mkdir()

    def install(
        self, name: str, version: str = "1.0", *requires: str, direct_url: object = None, in_index: bool = True
    ) -> None:
        """Install a distribution of one module; wheels of it are found unless ``in_index`` is False."""
        metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"]
        text = "".join([*metadata, *(f"Requires-Dist: {each}\n" for each in requires)])
        module = name.replace("-", "_")
        folder = self.installed / f"{module}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(text)
        (folder / "RECORD").write_text(f"{module}.py,,\n{folder.name}/METADATA,,\n")
        (self.installed / f"{module}.py").write_text("")
        if direct_url is not None:
            (folder / "direct_url.json").write_text(json.dumps(direct_url))
        if in_index:
            make_wheel(self.wheels, module, version, text)


def make_wheel(folder: Path, module: str, version: str, metadata: str, tag: str = "py3-none-any") -> Path:
    path = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        info = f"{module}-{version}.dist-info"
        wheel.writestr(f"{module}.py", f"VERSION = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return make_site(tmp_path, monkeypatch)


def make_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """Have a folder of installed distributions on the import path, and no index but a folder of wheels."""
    site = Site(tmp_path)
    for name in os.environ:
        if name.startswith(("PIP_", "UV_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(site.wheels))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(site.installed))
    return site
