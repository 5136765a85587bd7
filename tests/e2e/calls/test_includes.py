"""Files that an image includes, as calls see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import skyward as sky


@sky.compute
def seen() -> tuple[str, str, str, list[str]]:
    import sky_included  # pyright: ignore[reportMissingImports]

    started = subprocess.run(
        [sys.executable, "-c", "import sky_included as s; print(s.VALUE)"], capture_output=True, text=True, check=False
    )
    names = sorted(path.name for path in Path().iterdir())
    return sky_included.VALUE, Path("data/x.csv").read_text(encoding="utf-8"), started.stdout.strip(), names


def test_included_files_are_opened_and_imported_as_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sky_included").mkdir()
    (tmp_path / "sky_included" / "__init__.py").write_text("VALUE = 'from the file'\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.csv").write_text("1,2")
    monkeypatch.chdir(tmp_path)
    image = sky.Image(includes=["./sky_included", "./data"])

    with sky.ComputePool(provider=sky.Local(), image=image, display="quiet") as pool:
        monkeypatch.chdir("/")
        value, data, started, names = seen() >> pool

    assert (value, data, started) == ("from the file", "1,2", "from the file")
    assert names == ["data", "sky_included"]
