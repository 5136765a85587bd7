"""The pictures of the site: drawn by programs, and the terminal cast by a real run."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(DOCS)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "pictures"]:
        del sys.modules[name]


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pictures import cast

    path = folder / "program.py"
    path.write_text(text)
    monkeypatch.setattr(cast, "PROGRAM", path)


def test_cast_shows_the_lines_that_the_program_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pictures import cast

    program(tmp_path, "print('\\x1b[2mfaint\\x1b[0m & bright')", monkeypatch)
    cast.record_into(tmp_path / "cast.svg")

    picture = ET.parse(tmp_path / "cast.svg").getroot()
    spans = {span.text: span.get("class") for span in picture.iter("{http://www.w3.org/2000/svg}tspan")}
    assert spans == {"$ python first.py": "default", "faint": "brightblack", "& bright": "default"}


def test_cast_of_a_failing_program_is_an_error_that_shows_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pictures import cast

    program(tmp_path, "raise SystemExit('no such machine')", monkeypatch)
    with pytest.raises(RuntimeError, match=r"ended with 1(.|\n)*no such machine"):
        cast.record_into(tmp_path / "cast.svg")

    assert not (tmp_path / "cast.svg").exists()


def test_cast_is_kept_when_only_numbers_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pictures import cast

    path = tmp_path / "cast.svg"
    program(tmp_path, "print('took 1.5 s')", monkeypatch)
    cast.record_into(path)
    first = path.read_text()

    program(tmp_path, "print('took 27 s')", monkeypatch)
    cast.record_into(path)
    assert path.read_text() == first

    program(tmp_path, "print('never ended')", monkeypatch)
    cast.record_into(path)
    assert "never ended" in path.read_text()


def test_kept_pictures_are_those_that_the_programs_draw() -> None:
    from pictures import life, logo, top

    drawn = {"top.svg": top.draw(), **logo.draw(), **life.draw()}

    assert {
        name for name, text in drawn.items() if (DOCS / "images" / name).read_text(encoding="utf-8") != text
    } == set()


def test_search_pictures_are_those_of_the_recorded_run() -> None:
    from pictures import search

    drawn = search.draw()
    tutorial = (DOCS / "tutorials/hyper-parameter-search.md").read_text(encoding="utf-8")

    assert len(drawn) == 2
    for name, picture in drawn.items():
        best, good = max(trial[2] for trial in search.trials(name)), search.count_good(search.trials(name))
        assert f"{good} of them reach 0.97, the best {best:.3f}](../images/{name})" in tutorial
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == picture
        ET.fromstring(picture)
