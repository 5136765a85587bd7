"""Packages are packages wherever they lie: calls name them, and bring the user's own modules along.

Each layout runs one program (``layout_program.py``) that uses every front-end.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.gpus import FakeGpu, FakeGpus, Machine

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
SITE = Path(sysconfig.get_path("purelib"))
BASE = getattr(sys, "_base_executable", sys.executable)
PROGRAM = (HERE / "layout_program.py").read_text(encoding="utf-8")
OWN = {
    "own/__init__.py": "",
    "own/models.py": "class Model:\n    def __init__(self, size): self.size = size\n",
    "own/lazily.py": "from own.models import Model\ndef times(x): return 10 * Model(x).size\n",
}
EXPECTED = {"joblib": (6.0, "click", 30, True), "operators": (6.0, "click", 30, True), "dask": (6.0, "click", 30, True)}


@dataclass
class Layout:
    """Where packages and the user's modules are; ``path`` becomes ``PYTHONPATH``."""

    folder: Path
    packages: Path
    python: str = BASE
    path: list[Path | str] = field(default_factory=list)

    def own(self, place: str) -> Path:
        """Write the user's project into a folder."""
        for name, text in {**OWN, "layout_program.py": PROGRAM}.items():
            path = self.folder / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return self.folder / place

    def linked(self, place: str, names: Callable[[str], bool] = lambda _: True) -> Path:
        """Link the entries of the packages' folder with these names into another one."""
        folder = self.folder / place
        folder.mkdir(parents=True, exist_ok=True)
        for entry in self.packages.iterdir():
            if names(entry.name) and not (folder / entry.name).exists():
                _link(entry, folder / entry.name)
        return folder

    def environment(self, lines: Sequence[str | Path]) -> str:
        """Make an environment whose path is extended by the lines of a ``.pth`` file; return its interpreter."""
        subprocess.run([BASE, "-m", "venv", "--without-pip", self.folder / "venv"], check=True)
        (site,) = (self.folder / "venv/lib").glob("python3*/site-packages")
        (site / "more.pth").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(self.folder / "venv/bin/python")


def _link(source: Path, target: Path) -> None:
    """Copy a file or a folder by hard links: its real path is the new one."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link, dirs_exist_ok=True)
    else:
        os.link(source, target)


def _distributions(*names: str) -> Iterator[importlib.metadata.Distribution]:
    waiting, seen = [*names], set[str]()
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another system
            continue
        yield found
        needs = map(Requirement, found.requires or ())
        extras = ["dask"] if name == "skyward-fleet" else [""]
        waiting += [
            need.name for need in needs if not need.marker or any(need.marker.evaluate({"extra": e}) for e in extras)
        ]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``pip install --target`` leaves of Skyward and what it requires, by hard links; Skyward itself is a link."""
    folder = tmp_path_factory.mktemp("target") / "packages"
    for found in _distributions("skyward-fleet", "numpy", "joblib", "click"):
        for file in found.files or ():
            source = SITE / file
            if ".." not in file.parts and source.is_file() and file.suffix not in (".pth", ".pyc"):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(source, folder / file)
                except OSError:  # another file system
                    shutil.copy2(source, folder / file)
    for package in ("skyward", "skyward_dask", "skyward_joblib"):
        if not (folder / package).exists():
            (folder / package).symlink_to(ROOT / "src" / package)
    return folder


def plain(layout: Layout) -> None:
    layout.python = sys.executable
    layout.own("project")


def target(layout: Layout) -> None:
    layout.own("project")
    layout.path = [layout.packages]


def uv_run_with(layout: Layout) -> None:
    layout.python = layout.environment([f"import site; site.addsitedir({str(layout.packages)!r})"])
    layout.own("project")


def pth(layout: Layout) -> None:
    layout.python = layout.environment([layout.packages])
    layout.own("project")


def another_environment(layout: Layout) -> None:
    layout.own("project")
    layout.path = [SITE, ROOT / "src"]


def debian(layout: Layout) -> None:
    """Packages of the system have their metadata without a list of files."""
    folder = layout.linked("usr/lib/python3/dist-packages")
    for record in folder.glob("*.dist-info/RECORD"):
        record.unlink()
    layout.python = layout.environment([folder])
    layout.own("project")


def conda(layout: Layout) -> None:
    folder = layout.linked("opt/conda/lib/python3.11/site-packages", lambda name: not name.startswith("click-"))
    (layout.folder / "opt/conda/conda-meta").mkdir()
    (folder / "click-8.egg-info").write_text("Name: click\nVersion: 8\n", encoding="utf-8")
    layout.own("project")
    layout.path = [folder]


def nix(layout: Layout) -> None:
    """A prefix for each package, all of them on the path."""
    for name in ("click", "numpy"):
        prefix = f"nix/store/h4sh-{name}/lib/python3.11/site-packages"
        layout.path.append(layout.linked(prefix, lambda entry, name=name: entry.startswith(name)))
    layout.own("project")
    layout.path.append(layout.packages)


def pex(layout: Layout) -> None:
    """Each wheel unpacked in a folder of its own, the program beside them."""
    for name in ("click", "numpy"):
        wheel = f"pex/installed_wheels/{name}/{name}-1-py3-none-any.whl"
        layout.path.append(layout.linked(wheel, lambda entry, name=name: entry.startswith(name)))
    layout.own("pex/unzipped")
    layout.path.append(layout.packages)


def zipped(layout: Layout) -> None:
    """The user's modules and a package in one archive."""
    archive = layout.folder / "app.pyz"
    with zipfile.ZipFile(archive, "w") as file:
        for name, text in OWN.items():
            file.writestr(name, text)
        for path in [*layout.packages.glob("click/**/*.py"), *layout.packages.glob("click-*/*")]:
            file.write(path, path.relative_to(layout.packages))
    layout.own("project")
    shutil.rmtree(layout.folder / "project/own")
    layout.path = [archive, layout.packages]


def bootstrapped(layout: Layout) -> None:
    """A program that puts its packages onto the path itself."""
    folder = layout.own("project")
    program = folder / "layout_program.py"
    start = f"import sys\nsys.path.insert(1, {str(layout.packages)!r})\n"
    future, rest = PROGRAM.split("import json\n", 1)
    program.write_text(f"{future}{start}import json\n{rest}", encoding="utf-8")


def layer(layout: Layout) -> None:
    """A layer with packages, and the program in one folder with packages of its own."""
    task = layout.linked("var/task", lambda name: name.startswith("click"))
    layout.own("var/task")
    layout.path = [task, layout.linked("opt/python", lambda name: not name.startswith("click"))]


def bazel(layout: Layout) -> None:
    """Links to a repository for each package."""
    for name in ("click", "numpy"):
        repository = layout.linked(
            f"external/pip_{name}/site-packages", lambda entry, name=name: entry.startswith(name)
        )
        runfiles = layout.folder / f"app.runfiles/pip_{name}"
        runfiles.parent.mkdir(exist_ok=True)
        runfiles.symlink_to(repository.parent)
        layout.path.append(runfiles / "site-packages")
    layout.own("app.runfiles/main")
    layout.path.append(layout.packages)


def editable(layout: Layout) -> None:
    """The user's project, installed so that an import hook finds it."""
    project = layout.own("project")
    (layout.folder / "scripts").mkdir()
    (project / "layout_program.py").rename(layout.folder / "scripts/layout_program.py")
    (project / "own.egg-info").mkdir()
    (project / "own.egg-info/SOURCES.txt").write_text("own/__init__.py\n", encoding="utf-8")
    (project / "own.egg-info/top_level.txt").write_text("own\n", encoding="utf-8")
    layout.python = layout.environment(["import __editable___own_finder", layout.packages])
    (site,) = (layout.folder / "venv/lib").glob("python3*/site-packages")
    (site / "own-1.dist-info").mkdir()
    (site / "own-1.dist-info/METADATA").write_text("Name: own\nVersion: 1\n", encoding="utf-8")
    (site / "own-1.dist-info/RECORD").write_text("__editable___own_finder.py,,\n", encoding="utf-8")
    (site / "__editable___own_finder.py").write_text(
        "import sys\nfrom importlib.machinery import PathFinder\n"
        "class Finder:\n    @classmethod\n    def find_spec(cls, name, path=None, target=None):\n"
        f"        return PathFinder.find_spec(name, path or [{str(project)!r}]) if name.startswith('own') else None\n"
        "sys.meta_path.append(Finder)\n",
        encoding="utf-8",
    )


QUICK = (target, layer, zipped, bootstrapped)
LAYOUTS = (
    plain,
    bootstrapped,
    target,
    uv_run_with,
    pth,
    another_environment,
    debian,
    conda,
    nix,
    pex,
    zipped,
    layer,
    bazel,
    editable,
)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[] if each in QUICK else pytest.mark.full, id=each.__name__) for each in LAYOUTS],
)
def test_every_front_end_runs_in_every_layout(layout: Callable[[Layout], None], packages: Path, tmp_path: Path) -> None:
    made = Layout(folder=tmp_path, packages=packages)
    layout(made)
    (program,) = tmp_path.rglob("layout_program.py")

    done = run(made.python, program, {"PYTHONPATH": os.pathsep.join(map(str, made.path))})

    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {name: tuple(value) for name, value in results.items() if name in EXPECTED} == EXPECTED
    assert results["notebook"][0::2] == [6.0, 30]
    assert results["notebook"][3]


TORCH = """
__version__ = "2.13.0"
class version: cuda = "13.0"
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda index: "NVIDIA H100 80GB HBM3")
"""
GPU_CHECKS = (
    "test_current_accelerator_is_the_gpus_model",
    "test_instance_info_names_every_gpu_of_the_worker",
    "test_a_pool_that_requests_the_gpu_by_name_opens",
)


def test_gpu_checks_run_with_packages_in_a_folder_of_their_own(packages: Path, tmp_path: Path) -> None:
    gpus = FakeGpus(tmp_path / "gpus.json", Machine(gpus=[FakeGpu()]))
    layout = Layout(folder=tmp_path, packages=packages)
    folder = layout.linked("target")
    (folder / "torch.py").write_text(TORCH, encoding="utf-8")
    (folder / "torch-2.13.0.dist-info").mkdir()
    (folder / "torch-2.13.0.dist-info/METADATA").write_text("Name: torch\nVersion: 2.13.0\n", encoding="utf-8")
    (folder / "torch-2.13.0.dist-info/RECORD").write_text("torch.py,,\n", encoding="utf-8")
    variables = gpus.install(tmp_path / "bin")
    path = [str(tmp_path / "bin"), str(folder)]
    names = [f"checks.Accelerators.{name}" for name in GPU_CHECKS]

    done = subprocess.run(
        [BASE, "-m", "unittest", *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=ROOT / "tests/gpu",
        env={**clean_environment(), **variables, "PYTHONPATH": os.pathsep.join(path)},
    )

    assert done.returncode == 0, done.stderr
    assert f"Ran {len(names)} tests" in done.stderr


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def run(python: str, program: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    env = clean_environment()
    return subprocess.run(
        [python, program], capture_output=True, text=True, check=False, timeout=100, env={**env, **variables}, cwd="/"
    )
