"""Each example prints what the gallery shows. Those that need doubles or frameworks have tests of their own."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gallery
from support.gpus import FakeGpu, FakeGpus, Machine

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

ON_GPUS, ON_HOSTS = "operators/gpu_partitions.py", "providers/ssh_hosts.py"
HERE = sorted(set(gallery.shown()) - set(gallery.ELSEWHERE) - {ON_GPUS, ON_HOSTS})
MEASURED = {"operators/compare_machines.py"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[[str], None]:
    """Runs an example as the page does, and compares."""

    def run(example: str) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [example, *gallery.shown()[example].arguments])
        runpy.run_path(str(gallery.EXAMPLES / example), run_name="__main__")
        gallery.compare(example, capsys.readouterr().out, exactly=example not in MEASURED)
        for picture in tmp_path.glob("*.svg"):
            gallery.compare_picture(example, picture)

    return run


@pytest.fixture
def h100(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have this process, and those that it starts, find an H100, which is whole in the end."""
    folder = tmp_path_factory.mktemp("gpus")
    gpus = FakeGpus(folder / "gpus.json", Machine(gpus=[FakeGpu()]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in gpus.install(folder / "bin").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "pynvml", gpus.nvml())
    yield
    assert not gpus.machine.gpus[0].mig


@pytest.mark.parametrize("example", HERE)
def test_an_example_prints_what_the_gallery_shows(example: str, run: Callable[[str], None]) -> None:
    run(example)


@pytest.mark.usefixtures("h100")
def test_an_h100_is_cut_into_two_and_whole_afterwards(run: Callable[[str], None]) -> None:
    run(ON_GPUS)


def test_two_hosts_do_what_the_gallery_shows(
    lab: Path, run: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(lab))
    run(ON_HOSTS)
