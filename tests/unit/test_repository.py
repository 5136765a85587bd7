"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

import gallery

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
FILES = sorted(SOURCE.rglob("*.py"))
TEXTS = sorted(path for path in SOURCE.rglob("*") if path.suffix in {".py", ".sh", ".toml", ".yaml"})
DOCS = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))])

HEAVY = ("boto3", "cryptography", "dask", "distributed", "joblib", "numpy", "paramiko", "rich")

TOO_LARGE = {
    "skyward/client/pool.py:__init__": "one parameter after the other",
}
"""What may exceed the sizes, with the reason. Four entries at most."""

VENDORS = {
    "aws": ("AWS", "EC2", "boto3", "botocore"),
    "digitalocean": ("DigitalOcean", "digital ocean", "droplet", "doctl"),
    "verda": ("Verda", "DataCrunch"),
    "vastai": ("VastAI", "vast.ai"),
    "runpod": ("RunPod",),
}
"""A provider's module under ``skyward.providers``, and the words that belong there only."""

NAMED_BY_THE_API = {
    "skyward/__init__.py",  # the public names of the providers
    "skyward/providers/__init__.py",  # likewise, and where they lie
    "skyward/providers/registry.py",  # which class each name means
    "skyward/accelerators.py",  # chips that bear their maker's name
    "skyward/request",  # Accelerator.AWS, S3Volume
    "skyward/providers/storage/s3.py",  # implements S3Volume, for machines of every provider
}
"""Where the specification itself puts a vendor's name."""


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def modules() -> Iterator[str]:
    """Every module whose name, and whose packages' names, do not start with an underscore."""
    for path in FILES:
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not any(part.startswith("_") for part in name.split(".")):
            yield name


# --- sizes --------------------------------------------------------------------------------------------------------


LIMITS = {"file": 400, "class": 250, "function": 40}
"""In code lines: without blank lines, comments and docstrings."""


def load_prose() -> ModuleType:
    """``tools/prose``, a program without a suffix."""
    loader = SourceFileLoader("prose", str(ROOT / "tools/prose"))
    spec = importlib.util.spec_from_loader("prose", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prose"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


prose = load_prose()


def code_lines(source: str) -> int:
    return prose.code_lines(source, ast.parse(source))


def too_large(path: Path) -> Iterator[tuple[str, str]]:
    text = path.read_text(encoding="utf-8")
    parts = [("file", relative(path), text)]
    for node in ast.walk(parse(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                kind = "function"
            case ast.ClassDef(name=name):
                kind = "class"
            case _:
                continue
        source = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
        parts.append((kind, f"{relative(path)}:{name}", textwrap.dedent(source)))
    for kind, where, source in parts:
        if source.count("\n") >= LIMITS[kind] and (lines := code_lines(source)) > LIMITS[kind]:
            yield where, f"{lines} lines, at most {LIMITS[kind]}"


def test_functions_classes_and_files_stay_within_their_sizes() -> None:
    found = {where: size for path in FILES for where, size in too_large(path)}

    assert {where: size for where, size in found.items() if where not in TOO_LARGE} == {}
    assert [where for where in TOO_LARGE if where not in found] == [], "no longer too large: remove the exception"
    assert len(TOO_LARGE) <= 4


PROVIDER_LIMITS = {"source": 420, "tests": 500}
"""In code lines, for all files of a provider's. AWS has stores, networks and Session Manager besides."""
CONTAINERS = {"runpod": {"source": 520}, "vastai": {"source": 520}}
"""Limits of providers of containers, which bring their own boot."""


def test_a_provider_stays_small_and_leaves_to_the_kit_what_is_not_its_own(subtests: pytest.Subtests) -> None:
    for vendor in VENDORS.keys() - {"aws"}:
        with subtests.test(vendor=vendor):
            places = {
                "source": [
                    *SOURCE.glob(f"skyward/providers/{vendor}.py"),
                    *SOURCE.glob(f"skyward/providers/{vendor}/*.py"),
                ],
                "tests": [
                    *(ROOT / "tests/unit/providers").rglob(f"*{vendor}*.py"),
                    *(ROOT / f"tests/unit/providers/{vendor}").glob("*.py"),
                ],
            }
            sizes = {
                what: sum(code_lines(path.read_text(encoding="utf-8")) for path in set(paths))
                for what, paths in places.items()
            }

            limits = PROVIDER_LIMITS | CONTAINERS.get(vendor, {})
            assert {what: size for what, size in sizes.items() if size > limits[what]} == {}


MOST_ENTRIES = 16
SHARED_NAMES = {"__init__", "__main__", "base", "provider", "errors"}


def _holds_files(path: Path) -> bool:
    """Return False for a folder with nothing but caches: git leaves those behind after a rename."""
    return path.is_file() or any(path.rglob("*.py"))


def test_no_folder_shows_more_than_sixteen_entries() -> None:
    hidden = {"__init__.py", "__main__.py", "__pycache__", "conftest.py", "py.typed"}
    folders = {path.parent for path in FILES} | {path.parent for path in (ROOT / "tests").rglob("*.py")}
    counts = {
        folder: sum(path.name not in hidden and _holds_files(path) for path in folder.iterdir()) for folder in folders
    }

    assert {folder.as_posix(): count for folder, count in counts.items() if count > MOST_ENTRIES} == {}


def test_no_file_and_no_class_has_the_name_of_another_one() -> None:
    files = Counter(path.stem.lstrip("_") for path in FILES if path.stem not in SHARED_NAMES)
    classes = Counter(node.name for path in FILES for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef))

    assert [name for name, count in files.items() if count > 1 and name not in SHARED_NAMES] == []
    assert [name for name, count in classes.items() if count > 1] == []


# --- names --------------------------------------------------------------------------------------------------------


def public_definitions(module: ModuleType) -> set[str]:
    """What the module itself defines and a reader would take for public."""
    tree = parse(Path(inspect.getfile(module)))
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case _:
                continue
    return {name for name in names if not name.startswith("_")}


def test_all_names_every_public_definition(subtests: pytest.Subtests) -> None:
    for name in list(modules()):
        with subtests.test(name=name):
            module = importlib.import_module(name)
            exported = getattr(module, "__all__", None)
            definitions = public_definitions(module)
            if exported is None:
                assert definitions == set(), "a public module has an __all__"
                continue

            assert definitions - set(exported) == set()
            assert [attribute for attribute in exported if not hasattr(module, attribute)] == []


def test_no_submodule_bears_the_name_of_a_public_object() -> None:
    skyward = importlib.import_module("skyward")
    allowed = {"accelerators", "distributed", "errors", "integrations"}  # public as modules

    taken = {path.stem for path in (SOURCE / "skyward").iterdir() if not path.name.startswith("_")}

    assert taken & set(skyward.__all__) - allowed == set()


def test_every_vendor_has_its_words_listed() -> None:
    registry = importlib.import_module("skyward.providers.registry")
    rented = [name for name in registry.BUILT_IN if registry.is_rented(registry.provider_type(name))]

    assert [name for name in rented if name not in VENDORS] == []


def test_a_vendor_is_named_in_its_provider_only(subtests: pytest.Subtests) -> None:
    for vendor, named in VENDORS.items():
        with subtests.test(vendor=vendor):
            words = re.compile("|".join(rf"\b{re.escape(word)}" for word in named), re.IGNORECASE)
            own = (f"skyward/providers/{vendor}.py", f"skyward/providers/{vendor}/")
            own = (*own, f"skyward/testing/{vendor}.py", f"skyward/testing/{vendor}/")  # its double

            found = [
                relative(path)
                for path in TEXTS
                if not relative(path).startswith((*own, *NAMED_BY_THE_API))
                and words.search(path.read_text(encoding="utf-8"))
            ]

            assert found == []


# --- imports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statement", ["import skyward", "import skyward.errors, skyward.submission"])
def test_importing_skyward_loads_nothing_heavy(statement: str) -> None:
    script = f"import sys; {statement}; print(*sorted({set(HEAVY)} & sys.modules.keys()))"

    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)

    assert completed.stdout.split() == []


def test_every_import_package_says_that_it_is_typed() -> None:
    packages = [path.parent for path in SOURCE.glob("*/__init__.py")]

    assert sorted(package.name for package in packages) == ["skyward", "skyward_dask", "skyward_joblib"]
    assert [package.name for package in packages if not (package / "py.typed").exists()] == []


LINUX_ONLY = re.compile(
    r"memfd_create|epoll|sched_getaffinity|pidfd|waitid|prctl|CLOCK_BOOTTIME|MADV_HUGE|os\.O_PATH|setns|unshare|inotify"
    r"|/proc\b|/sys/fs|/dev/shm"
)
LINUX_MODULES = (
    "skyward/_concurrency/linux_parts.py",
    # Programs of nodes about one facility of Linux alone.
    "skyward/node/cgroups.py",
    "skyward/node/gpu/partitioner.py",
    "skyward/node/supervisor/proc_entry.py",
    "skyward/node/supervisor/template.py",
    "skyward/node/supervisor/template_program.py",
    "skyward/node/worker/mapped_blobs.py",
    # Text of programs that run on nodes.
    "skyward/providers/_common/boot/container_boot.py",
    "skyward/provision/preparing/machine_size.py",
    "skyward/provision/preparing/node_handle.py",
    # Simulated machines of tests.
    "skyward/testing/_guard.py",
    "skyward/testing/hosts.py",
)


def test_calls_that_only_linux_has_are_in_one_module() -> None:
    def lines_of(path: Path) -> set[str]:
        tree = parse(path)
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        return {
            text
            for node in ast.walk(tree)
            if id(node) not in prose and (text := _name_or_text(node)) and LINUX_ONLY.search(text)
        }

    elsewhere = {relative(path): lines_of(path) for path in FILES if relative(path) not in LINUX_MODULES}

    assert {place: found for place, found in elsewhere.items() if found} == {}


def _name_or_text(node: ast.AST) -> str:
    match node:
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
        case ast.Constant(value=str(text)):
            return text
        case _:
            return ""


# --- documentation ------------------------------------------------------------------------------------------------


def test_the_map_names_every_module() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    names = [relative(path).removeprefix("skyward/") for path in FILES if path.stem not in {"__init__", "__main__"}]

    assert [name for name in names if f"`{name}`" not in page] == [], "run tools/map"


def documented(name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", DOCS) is not None


@pytest.mark.parametrize("module", ["skyward", "skyward.errors", "skyward.providers", "skyward_dask", "skyward_joblib"])
def test_every_public_name_appears_in_the_docs(module: str) -> None:
    names = getattr(importlib.import_module(module), "__all__", [])

    assert [name for name in names if not documented(name)] == []


def test_what_the_map_names_exists() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    missing: list[str] = []
    for path, name in re.findall(r"`((?:\w+/)*\w+\.py)(?:::([\w.]+))?`", page):
        places = [place / path for place in (SOURCE / "skyward", SOURCE, ROOT) if (place / path).is_file()]
        text = places[0].read_text(encoding="utf-8") if places else ""
        words = name.split(".") if name else []
        if not places or not all(re.search(rf"(?:def|class) {word}\b|\b{word}\b[^\n]* = ", text) for word in words):
            missing.append(f"{path}::{name}")

    assert missing == []


def test_every_event_appears_in_the_docs_with_its_fields() -> None:
    events = importlib.import_module("skyward.events")

    for event in (*get_args(events.SkywardEvent), events.GpuMetrics):
        names = [event.__name__, *(field.name for field in fields(event))]
        assert [name for name in names if not documented(name)] == []


def test_every_provider_has_a_test_file_and_a_row_in_the_docs() -> None:
    providers = {
        path.stem
        for path in (SOURCE / "skyward" / "providers").iterdir()
        if not path.name.startswith("_") and path.stem not in ("base", "registry", "storage")
    }
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests").rglob("test_*.py")}

    assert sorted(providers - tests - {f"{name}_provider" for name in tests}) == []
    assert [name for name in sorted(providers) if not re.search(rf"\|.*`{name}\(", DOCS, re.IGNORECASE)] == []


def test_every_error_in_the_tree_is_drawn_in_it() -> None:
    errors = importlib.import_module("skyward.errors")

    assert [name for name in errors.__all__ if name not in (errors.__doc__ or "")] == []


# --- tests --------------------------------------------------------------------------------------------------------


def test_every_allowed_skip_is_of_a_test_that_exists_and_gives_a_reason() -> None:
    entries = [line.split(maxsplit=1) for line in (ROOT / "tests/skips.txt").read_text(encoding="utf-8").splitlines()]

    for entry in entries:
        if entry and not entry[0].startswith("#"):
            file, *_, test = entry[0].split("::")
            places = [ROOT / file, SOURCE / "skyward/testing/provider_contract.py"]  # whose tests others inherit
            written = "".join(place.read_text(encoding="utf-8") for place in places)
            assert f"def {test.partition('[')[0]}(" in written
            assert len(entry) == 2


# --- examples -----------------------------------------------------------------------------------------------------


TOPICS = 22
"""Topics of examples in the specification's index."""


def test_every_example_is_in_the_gallery_and_among_its_topics() -> None:
    names = {path.relative_to(gallery.EXAMPLES).as_posix() for path in gallery.EXAMPLES.rglob("*.py")}
    programs = {name for name in names if not name.startswith("extending/")}  # packages: docs/extending
    page = gallery.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+) \| (\[`.*) \|$", page, re.MULTILINE)

    assert set(gallery.shown()) == programs
    assert {name for _, cell in rows for name in re.findall(r"`(.+?)`", cell)} == programs
    assert len({topic for topic, _ in rows}) == TOPICS
    assert [name for name in programs if f"../../examples/{name}\n" not in page] == []
    assert [name for name in programs if f"\nusage: python examples/{name}" not in program(name)] == []


def program(name: str) -> str:
    return (gallery.EXAMPLES / name).read_text(encoding="utf-8")


def test_every_example_has_a_test() -> None:
    tests = {name: (ROOT / "tests" / test).read_text(encoding="utf-8") for name, test in gallery.ELSEWHERE.items()}

    assert set(tests) <= set(gallery.shown())
    assert [name for name, test in tests.items() if "gallery.compare(" not in test] == []
    by_name = [name for name in tests if not name.startswith("joblib/")]  # whose test takes all in the folder
    assert [name for name in by_name if Path(name).stem not in tests[name]] == []


def test_no_folder_of_examples_shows_more_than_sixteen_entries() -> None:
    folders = [gallery.EXAMPLES, *(path for path in gallery.EXAMPLES.iterdir() if path.is_dir())]

    assert [folder.name for folder in folders if sum(_holds_files(path) for path in folder.iterdir()) > 16] == []
