"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
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

VENDORS = {
    "aws": ("AWS", "EC2", "boto3", "botocore"),
    "digitalocean": ("DigitalOcean", "digital ocean", "droplet", "doctl"),
    "verda": ("Verda", "DataCrunch"),
    "vastai": ("VastAI", "vast.ai"),
    "runpod": ("RunPod",),
}
"""A provider's module under ``skyward.providers``, and the words that belong there only."""

NAMED_BY_THE_API = {
    "skyward/providers/__init__.py",  # the providers' names, and where they lie
    "skyward/providers/list_prices.toml",  # what each asks for its machines
    "skyward/providers/registry.py",  # which class each name means
    "skyward/providers/storage.py",  # which module keeps each kind of volume
    "skyward/accelerators.py",  # chips that bear their maker's name
    "skyward/request",  # Accelerator.AWS, S3Volume
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


MAX_FUNCTION_LINES = 50
"""In code lines: without blank lines, comments and docstrings."""
TOO_LONG = {"skyward/api/pool.py:__init__": "one parameter after the other"}


def count_code_lines(function: ast.AST, lines: list[str]) -> int:
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    strings = {
        line
        for node in ast.walk(function)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    numbers = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    return sum(
        number not in strings and bool(text := lines[number - 1].strip()) and not text.startswith("#")
        for number in numbers
    )


def functions_in(path: Path) -> Iterator[tuple[str, int]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{relative(path)}:{node.name}", count_code_lines(node, lines)


def test_functions_stay_within_their_size() -> None:
    too_long = {where: size for path in FILES for where, size in functions_in(path) if size > MAX_FUNCTION_LINES}

    assert too_long.keys() == TOO_LONG.keys()


def test_no_class_has_the_name_of_another_one() -> None:
    classes = Counter(node.name for path in FILES for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef))

    assert [name for name, count in classes.items() if count > 1] == []


# --- names --------------------------------------------------------------------------------------------------------


DOCUMENTED = set(re.findall(r"^\.\. automodule:: (\S+)$", DOCS, re.MULTILINE))
"""Modules that the reference documents: their names are for users."""
OWN = (
    *(
        f"skyward.{name}."
        for name in (
            *("api", "base", "cli", "display", "environment", "events", "fleet", "ledger", "machine", "market", "node"),
            *("providers", "request", "scheduling", "shipping", "testing.aws", "wire"),
        )
    ),
    "skyward.distributed._",
    "skyward_dask.",
    "skyward_joblib.",
)
"""Modules below these packages are Skyward's own: the package lists the names for users."""


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
                assert name not in DOCUMENTED, "a module of the reference has an __all__"
                assert definitions == set() or name.startswith(OWN), "a public module has an __all__"
                continue

            assert definitions - set(exported) == set() or name.startswith(OWN)
            assert [attribute for attribute in exported if not hasattr(module, attribute)] == []


def test_no_submodule_bears_the_name_of_a_public_object() -> None:
    skyward = importlib.import_module("skyward")
    allowed = {"accelerators", "distributed", "errors", "integrations"}  # public as modules

    taken = {path.stem for path in (SOURCE / "skyward").iterdir() if not path.name.startswith("_")}

    assert taken & set(skyward.__all__) - allowed == set()


def test_every_vendor_has_its_words_listed() -> None:
    registry = importlib.import_module("skyward.providers.registry")
    rented = [name for name in registry.BUILT_IN if not registry.provider_type(name).own_machines]

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
    "skyward/base/platform.py",
    # Programs of nodes about one facility of Linux alone.
    "skyward/node/cgroups.py",
    "skyward/node/gpu/partitioner.py",
    "skyward/node/processes.py",
    "skyward/node/supervisor/forking.py",
    "skyward/fleet/template_process.py",
    "skyward/node/worker/mapped_blobs.py",
    # Text of programs that run on nodes.
    "skyward/providers/_common/machine_boot.py",
    "skyward/fleet/machine_size.py",
    "skyward/environment/supervisor_check.py",
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


def documented(name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", DOCS) is not None


@pytest.mark.parametrize("module", ["skyward", "skyward.errors", "skyward.providers", "skyward_dask", "skyward_joblib"])
def test_every_public_name_appears_in_the_docs(module: str) -> None:
    names = getattr(importlib.import_module(module), "__all__", [])

    assert [name for name in names if not documented(name)] == []


def test_every_event_appears_in_the_docs_with_its_fields() -> None:
    events = importlib.import_module("skyward.events")

    for event in (*get_args(events.SkywardEvent), events.GpuMetrics):
        names = [event.__name__, *(field.name for field in fields(event))]
        assert [name for name in names if not documented(name)] == []


def test_every_provider_has_a_test_file_and_a_row_in_the_docs() -> None:
    providers = {
        path.stem
        for path in (SOURCE / "skyward" / "providers").iterdir()
        if not path.name.startswith("_") and path.stem not in ("base", "list_prices", "registry", "several", "storage")
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


TOPICS = 28
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
