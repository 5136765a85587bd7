from __future__ import annotations

import builtins
import gc
import importlib
import importlib.util
import linecache
import os
import pickle
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyward.shipping.pickling import LARGE_BYTES, pack, unpack
from skyward.shipping.project_modules import SentSources, needed_with, source_set, sources_of
from skyward.shipping.received_modules import SourceFinder, is_received
from skyward.shipping.remote_exceptions import pack_error, unpack_error
from skyward.submission import Invocation
from skyward.testing.in_process import InProcessSubmitter
from skyward.wire.messages import ModuleSource

FILES = {
    "sky_helper.py": "import sky_deeper\n\ndef times(x):\n    return sky_deeper.FACTOR * x\n",
    "sky_deeper.py": "FACTOR = 10\n",
    "sky_pkg/__init__.py": "",
    "sky_pkg/inner.py": "def seven():\n    from . import outer\n    from .deep.leaf import ONE\n"
    "    return outer.SIX + ONE\n",
    "sky_pkg/outer.py": "from .unfindable import *\nSIX = 6\n",
    "sky_pkg/unneeded.py": "",
    "sky_space/part/leaf.py": "VALUE = 4\n",
    "sky_pkg/deep/__init__.py": "",
    "sky_pkg/deep/leaf.py": "ONE = 1\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the user's modules on ``sys.path``; nothing of it stays."""
    finders, modules = list(sys.meta_path), set(sys.modules)
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "sky_pkg/unfindable.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.meta_path[:] = finders
    for name in set(sys.modules) - modules:
        if name.startswith("sky_"):
            del sys.modules[name]


@pytest.fixture
def elsewhere(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to be on a node: the user's folder is not there."""

    def leave() -> None:
        monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(project)])
        for name in [name for name in sys.modules if name.startswith("sky_")]:
            del sys.modules[name]

    return leave


def edition(number: int, text: str, name: str = "sky_served") -> ModuleSource:
    return ModuleSource(name=name, text=text, is_package=False, origin=f"/gone/{name}.py", edition_ns=number)


@pytest.fixture
def finder() -> Iterator[SourceFinder]:
    before = list(sys.meta_path)
    yield SourceFinder()
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.startswith("sky_")]:
        del sys.modules[name]


def plain_import() -> Any:
    import sky_helper

    return sky_helper.times(2)


def from_import() -> Any:
    from sky_helper import times

    return times(3)


def import_as() -> Any:
    import sky_helper as h

    return h.times(4)


def dotted() -> Any:
    import sky_pkg.inner

    return sky_pkg.inner.seven()


def from_package() -> Any:
    from sky_pkg import inner

    return inner.seven()


def nested() -> Any:
    def deep() -> Any:
        import sky_helper

        return sky_helper.times(5)

    return deep()


def from_namespace() -> Any:
    from sky_space.part.leaf import VALUE

    return VALUE


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (plain_import, 20),
        (from_import, 30),
        (import_as, 40),
        (dotted, 7),
        (from_package, 7),
        (nested, 50),
        (from_namespace, 4),
    ],
)
def test_modules_imported_inside_a_function_travel(
    function: Callable[[], Any], result: object, elsewhere: Callable[[], None]
) -> None:
    packed = pack(function, what="it")
    assert not [name for name in sys.modules if name.startswith("sky_")], "packing imports nothing"
    elsewhere()
    assert unpack(packed.data)() == result


def test_a_module_by_value_brings_what_its_functions_import(project: Path, elsewhere: Callable[[], None]) -> None:
    (project / "sky_top.py").write_text("def run():\n    import sky_helper\n    return sky_helper.times(1)\n")
    packed = pack(importlib.import_module("sky_top").run, what="it")
    elsewhere()
    assert unpack(packed.data)() == 10


@pytest.mark.parametrize("is_in_the_table", [True, False], ids=["another of its name", "loaded anew"])
def test_a_module_that_its_name_does_not_find_goes_as_it_is(
    project: Path, elsewhere: Callable[[], None], *, is_in_the_table: bool
) -> None:
    (project / "second").mkdir()
    (project / "second/sky_deeper.py").write_text("FACTOR = 77\n\ndef factor():\n    return FACTOR\n")
    first = importlib.import_module("sky_deeper")
    if is_in_the_table:
        spec = spec_from_file_location("sky_deeper", project / "second/sky_deeper.py")
        assert spec is not None
        assert spec.loader is not None
        held = module_from_spec(spec)
        spec.loader.exec_module(held)
    else:
        held = first
        vars(held).update(FACTOR=77, factor=lambda: 77)
        del sys.modules["sky_deeper"]
        importlib.import_module("sky_deeper")
    packed = pack((held, importlib.import_module("sky_deeper")), what="them")
    elsewhere()
    there, found = unpack(packed.data)
    assert (there.FACTOR, there.factor(), found.FACTOR) == (77, 77, 10)


def test_only_what_is_needed_travels(project: Path) -> None:
    names = [source.name for source in sources_of(["sky_pkg.inner", "numpy", "skyward", "json", "sky_absent"])]
    assert names == [
        "sky_pkg",
        "sky_pkg.deep",
        "sky_pkg.deep.leaf",
        "sky_pkg.inner",
        "sky_pkg.outer",
        "sky_pkg.unfindable",
    ]


def test_large_arrays_of_such_a_function_stay_out_of_the_pickle(elsewhere: Callable[[], None]) -> None:
    array = np.zeros(LARGE_BYTES, dtype="u1")
    array[3] = 3

    def fn() -> Any:
        import sky_helper

        array[0] = 1
        return sky_helper.times(int(array.sum()))

    packed = pack(fn, what="it")
    assert len(packed.data) < 4000
    elsewhere()
    assert unpack(packed.data, [bytearray(buffer) for buffer in packed.buffers])() == 40


def test_the_module_of_the_process_itself_is_not_shadowed(project: Path) -> None:
    module = importlib.import_module("sky_helper")
    with InProcessSubmitter() as submitter:
        call = Invocation(fn=plain_import, args=(), kwargs={}, label="it")
        assert submitter.submit_calls([call])[0].result(10) == 20
    assert sys.modules["sky_helper"] is module
    del sys.modules["sky_helper"]
    assert not is_received(importlib.import_module("sky_helper"))


def test_changed_code_is_picked_up_by_the_next_function(project: Path, elsewhere: Callable[[], None]) -> None:
    def packed_with(factor: int) -> bytes:
        (project / "sky_deeper.py").write_text(f"FACTOR = {factor}\n")
        os.utime(project / "sky_deeper.py", ns=(factor, factor))
        return pack(plain_import, what="it").data

    ten, two, again = packed_with(10), packed_with(2), packed_with(10)
    assert again != ten, "a worker that kept the first function would not take the sources again"
    assert pack(plain_import, what="it").data == again
    elsewhere()
    assert [unpack(data)() for data in (ten, two, again)] == [20, 4, 20]


def test_an_edit_that_keeps_size_and_times_is_seen(project: Path) -> None:
    path = project / "sky_deeper.py"
    for factor in (10, 20, 30):
        path.write_text(f"FACTOR = {factor}\n")
        os.utime(path, ns=(1, 1))
        assert [source.text for source in sources_of(["sky_deeper"])] == [f"FACTOR = {factor}\n"]


def test_a_later_edition_counts_as_later_although_the_clock_was_set_back(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editions: list[int] = []
    for now in (2**62 + 5, 2**62 + 5, 2**62):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        (project / "sky_deeper.py").write_text(f"FACTOR = {len(editions)}\n")
        editions += [source.edition_ns for source in sources_of(["sky_deeper"])]
    assert editions == [2**62 + 5, 2**62 + 6, 2**62 + 7]


def test_a_module_that_hides_an_installed_one_since_travels(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not sources_of(["tblib.pickling_support"])
    (project / "first" / "tblib").mkdir(parents=True)
    (project / "first" / "tblib" / "__init__.py").write_text("MINE = 1\n")
    monkeypatch.syspath_prepend(project / "first")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tblib"]:
        monkeypatch.delitem(sys.modules, name)
    assert [source.text for source in sources_of(["tblib"])] == ["MINE = 1\n"]


def test_an_older_edition_does_not_replace_a_newer_one(finder: SourceFinder) -> None:
    finder.add([edition(2, "VALUE = 'new'")])
    finder.add([edition(1, "VALUE = 'old'")])
    assert importlib.import_module("sky_served").VALUE == "new"


def test_a_changed_module_renews_those_that_hold_it_and_no_others_edition_does(finder: SourceFinder) -> None:
    holder = edition(1, "import sky_served\ndef value(): return sky_served.VALUE", "sky_holder")
    finder.add([edition(1, "VALUE = 1"), holder])
    first = importlib.import_module("sky_holder")
    finder.add([edition(1, "VALUE = 1"), holder])
    assert importlib.import_module("sky_holder") is first
    finder.add([edition(2, "VALUE = 2"), holder])
    assert importlib.import_module("sky_holder").value() == 2


def test_a_mere_folder_of_the_same_name_does_not_hide_a_source(
    finder: SourceFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sky_served").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    finder.add([edition(1, "VALUE = 1")])
    assert importlib.import_module("sky_served").VALUE == 1


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finder: SourceFinder) -> Iterator[Path]:
    """A folder of installed packages, with one that has data."""
    folder = tmp_path / "site-packages"
    (folder / "sky_mirrored").mkdir(parents=True)
    (folder / "sky_mirrored/__init__.py").write_text("from sky_mirrored import part\n")
    (folder / "sky_mirrored/part.py").write_text("NUMBER = 1\n")
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in [name for name in sys.modules if name.startswith("sky_mirrored")]:
        del sys.modules[name]


def mirrored(number: int, part: str) -> list[ModuleSource]:
    return [
        replace(edition(number, "from sky_mirrored import part\n", "sky_mirrored"), is_package=True),
        edition(number, part, "sky_mirrored.part"),
    ]


def test_a_package_installed_just_as_it_was_sent_is_imported_from_its_place_with_its_data(
    finder: SourceFinder, installed: Path
) -> None:
    finder.add(mirrored(1, "NUMBER = 1\n"))
    package = importlib.import_module("sky_mirrored")

    assert package.__file__ == str(installed / "sky_mirrored/__init__.py")
    assert not is_received(package.part)


def test_a_package_that_was_changed_since_it_was_installed_is_imported_from_its_sources(
    finder: SourceFinder, installed: Path
) -> None:
    finder.add(mirrored(1, "NUMBER = 1\n"))
    importlib.import_module("sky_mirrored")
    finder.add(mirrored(2, "NUMBER = 2\n"))

    assert importlib.import_module("sky_mirrored").part.NUMBER == 2


def test_code_of_dask_imports_the_installed_package_although_the_users_was_received_first(
    finder: SourceFinder, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "sky_mirrored/__init__.py").write_text("from .part import *\nfrom . import part\nMINE = False\n")
    monkeypatch.setattr(builtins, "__import__", builtins.__import__)
    finder.add([edition(1, "MINE = True", "sky_mirrored")])
    importer = {"__name__": "dask.config", "__spec__": ModuleSpec("dask.config", None), "__builtins__": builtins}

    exec("import sky_mirrored", importer)

    assert importer["sky_mirrored"].MINE is False
    assert importlib.import_module("sky_mirrored").MINE is True


def test_tracebacks_show_the_lines_of_the_edition_that_ran(finder: SourceFinder) -> None:
    for number, text in enumerate(("def fail():\n    1 / 0", "def fail():\n    raise KeyError(2)")):
        finder.add([edition(number, text)])
        with pytest.raises((ZeroDivisionError, KeyError)) as caught:
            importlib.import_module("sky_served").fail()
        shown = "".join(traceback.format_exception(caught.value))
        assert text.splitlines()[1].strip() in shown
    linecache.clearcache()


def test_classes_of_such_a_module_come_back_as_the_senders_own(project: Path, elsewhere: Callable[[], None]) -> None:
    text = "class SkyError(Exception):\n    pass\ndef fail():\n    raise SkyError('x')\n"
    (project / "sky_errors.py").write_text(text)

    def fail() -> None:
        import sky_errors

        sky_errors.fail()

    path, packed = list(sys.path), pack(fail, what="it")
    elsewhere()
    with pytest.raises(Exception, match="x") as caught:
        unpack(packed.data)()
    error = pack_error(caught.value)
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, SourceFinder)]
    del sys.modules["sky_errors"]
    sys.path[:] = path
    back = unpack_error(error, where="here")
    assert type(back) is importlib.import_module("sky_errors").SkyError


def test_what_travelled_can_be_sent_on(elsewhere: Callable[[], None]) -> None:
    packed = pack(plain_import, what="it")
    elsewhere()
    on = pack(unpack(packed.data), what="it")
    assert pickle.loads(on.data)() == 20
    assert b"FACTOR = 10" in on.data


def test_a_source_with_a_mistake_is_reported_where_it_is_imported(project: Path, elsewhere: Callable[[], None]) -> None:
    (project / "sky_deeper.py").write_text("FACTOR = = 1\n")
    packed = pack(plain_import, what="it")
    elsewhere()
    with pytest.raises(SyntaxError, match=r"invalid syntax \(sky_deeper.py, line 1\)"):
        unpack(packed.data)()


NODE = """
import os, pickle, sys
os.environ["SKYWARD_BLOB_DIRS"] = "/nowhere:" + sys.argv[1]
from skyward.shipping.received_modules import take_sources
take_sources(pickle.load(sys.stdin.buffer))
import importlib, importlib.resources, pkgutil
import sky_pkg.deep.leaf
print(open(os.path.join(os.path.dirname(sky_pkg.__file__), "data.txt")).read())
print(importlib.resources.files("sky_pkg").joinpath("assets/more.txt").read_text())
print(pkgutil.get_data("sky_pkg.deep", "in_a_package.txt").decode())
print(importlib.import_module("sky_pkg.unneeded").__name__)
print(sky_pkg.__file__.startswith(sys.argv[1]), "large.bin" in os.listdir(os.path.dirname(sky_pkg.__file__)))
print(sky_pkg.deep.leaf.ONE)
"""


def test_a_machine_without_the_folder_has_a_copy_with_the_files_of_a_package(project: Path, tmp_path: Path) -> None:
    for name in ("data.txt", "assets/more.txt", "deep/in_a_package.txt", ".env", "__pycache__/x.pyc"):
        (project / "sky_pkg" / name).parent.mkdir(exist_ok=True)
        (project / "sky_pkg" / name).write_text(name)
    (project / "sky_pkg/large.bin").write_bytes(bytes((1 << 20) + 1))
    sources = sources_of(["sky_pkg.deep.leaf"])
    assert {name for source in sources for name, _ in source.files}.isdisjoint({".env", "__pycache__/x.pyc"})
    sent = pickle.dumps(sources)
    (tmp_path / "node").mkdir()
    (project / "sky_pkg").rename(tmp_path / "gone")

    done = subprocess.run(
        [sys.executable, "-c", NODE, tmp_path / "node"], input=sent, capture_output=True, check=False, cwd="/"
    )

    assert done.returncode == 0, done.stderr.decode()
    data = ["data.txt", "assets/more.txt", "deep/in_a_package.txt"]
    assert done.stdout.decode().splitlines() == [*data, "sky_pkg.unneeded", "True False", "1"]


COMPILED = """
import os, pickle, sys
os.environ["SKYWARD_BLOB_DIRS"] = sys.argv[1]
from skyward.shipping.pickling import unpack_call
total, file = unpack_call(sys.stdin.buffer.read())()
print(total, file.startswith(sys.argv[1]))
"""


def test_a_compiled_module_beside_the_program_travels(project: Path, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("xxlimited")  # an example that comes with Python
    assert spec is not None
    shutil.copy(str(spec.origin), project)

    def fn() -> tuple[int, str]:
        import xxlimited  # type: ignore[import-not-found] # pyright: ignore[reportMissingImports]

        return xxlimited.foo(1, 2), xxlimited.__file__

    sent = pack(fn, what="it").data
    (project / Path(str(spec.origin)).name).unlink()
    (tmp_path / "node").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, tmp_path / "node"], input=sent, capture_output=True, check=False
    )

    assert done.stdout.split() == [b"3", b"True"], done.stderr.decode()


@pytest.mark.parametrize(
    "damaged",
    [b"VALUE = '\xe9'\n", b"# coding: no-such-encoding\n", b"\xff\xfeV\x00"],
    ids=["not UTF-8", "unknown encoding", "UTF-16"],
)
def test_a_module_that_cannot_be_read_concerns_only_the_calls_that_import_it(project: Path, damaged: bytes) -> None:
    (project / "sky_damaged.py").write_bytes(damaged)

    def fn() -> int:
        try:
            import sky_damaged  # type: ignore[import-not-found] # noqa: F401
        except (ImportError, SyntaxError, ValueError):
            return 3
        return 4

    assert unpack(pack(fn, what="it").data)() == 3


STORED = """
import os, pickle, subprocess, sys
node = sys.argv[1]
os.environ["SKYWARD_BLOB_DIRS"] = node
from skyward.shipping.received_modules import take_sources
sources = pickle.load(sys.stdin.buffer)
take_sources(sources)  # there is no such folder
try:
    import sky_stored
except OSError as error:
    print(type(error).__name__)
os.mkdir(node)
import sky_stored
print(sky_stored.VALUE, sky_stored.__file__.startswith(node), flush=True)
child = "import sys; sys.path.append(sys.argv[1]); import sky_stored; print(sky_stored.VALUE)"
subprocess.run([sys.executable, "-c", child, os.path.dirname(sky_stored.__file__)], check=True)
"""


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252", "utf-8-sig"])
def test_a_copy_that_could_not_be_stored_is_made_when_it_is_needed_in_the_encoding_it_states(
    project: Path, tmp_path: Path, encoding: str
) -> None:
    (project / "sky_stored.py").write_bytes(f"# -*- coding: {encoding} -*-\nVALUE = ascii('é')\n".encode(encoding))
    sent = pickle.dumps(sources_of(["sky_stored"]))
    (project / "sky_stored.py").unlink()

    done = subprocess.run(
        [sys.executable, "-c", STORED, tmp_path / "node"], input=sent, capture_output=True, check=False, cwd="/"
    )

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == ["FileNotFoundError", r"'\xe9' True", r"'\xe9'"]
    assert b"the module sky_stored could not be stored" in done.stderr


def test_editions_that_are_over_are_not_kept_with_their_files(project: Path) -> None:
    (project / "sky_pkg/data.bin").write_bytes(b"first")
    source = next(each for each in sources_of(["sky_pkg"]) if each.name == "sky_pkg")
    needed_with(source)
    (project / "sky_pkg/__init__.py").write_text("EDITION = 2\n")
    sources_of(["sky_pkg"])

    gc.collect()

    assert [type(each) for each in gc.get_referrers(source)] == []


def test_a_loaded_module_goes_as_it_was_until_it_is_reloaded(project: Path) -> None:
    module = importlib.import_module("sky_deeper")
    before = source_set(["sky_deeper"])
    assert before is not None
    (project / "sky_deeper.py").write_text("FACTOR = 3333\n")
    assert before.is_current()
    assert source_set(["sky_deeper"]) is before

    importlib.reload(module)

    assert not before.is_current()
    assert [source.text for source in sources_of(["sky_deeper"])] == ["FACTOR = 3333\n"]


def test_a_connection_carries_each_edition_once(project: Path) -> None:
    sent, path = SentSources(), project / "sky_deeper.py"

    def carried() -> list[str]:
        wanted = source_set(["sky_helper"])
        assert wanted is not None
        return [source.name for source in sent.missing(wanted)]

    assert [carried(), carried()] == [["sky_deeper", "sky_helper"], []]
    path.write_text("FACTOR = 11\n")
    assert [carried(), carried()] == [["sky_deeper"], []]


def test_a_changed_module_leaves_those_alone_that_do_not_import_it(finder: SourceFinder) -> None:
    finder.add([edition(1, "VALUE = 1"), edition(1, "STATE = []", "sky_other")])
    importlib.import_module("sky_served")
    other = importlib.import_module("sky_other")

    finder.add([edition(2, "VALUE = 2")])

    assert importlib.import_module("sky_other") is other
    assert importlib.import_module("sky_served").VALUE == 2


SHADOWS = """
import pickle, sys, queue, statistics
from skyward.shipping.received_modules import take_sources
take_sources(pickle.load(sys.stdin.buffer))
user = {"__name__": "__main__"}
def by(text, names):
    exec(text, names)
    return getattr(names["found"], "MINE", "theirs")
import asyncio, numpy
for library in (vars(asyncio), vars(statistics.random)):
    print(by("import queue as found", library), by("from queue import Queue as found", library), end=" ")
    print(by("import graphlib as found", library), by("import sched as found", library))
print(by("import queue as found", user), by("import graphlib as found", user), by("import sched as found", user))
print(pickle.loads(pickle.dumps(sys.modules["sched"].Thing)).MINE)
"""


def test_modules_with_the_names_of_others_are_for_the_users_code_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["queue", "graphlib", "sched"]
    for name in names:
        (project / f"{name}.py").write_text("MINE = 'mine'\nclass Thing:\n    MINE = 'mine'\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    sent = pickle.dumps(sources_of(names))

    done = subprocess.run([sys.executable, "-c", SHADOWS], input=sent, capture_output=True, check=False, cwd="/")

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == ["theirs theirs theirs theirs"] * 2 + ["mine mine mine", "mine"]
