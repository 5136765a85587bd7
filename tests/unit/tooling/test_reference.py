"""The reference has every public name, and inline code of the pages leads there."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
MODULES = [
    "skyward",
    "skyward.accelerators",
    "skyward.distributed",
    "skyward.errors",
    "skyward.integrations",
    "skyward.providers",
    "skyward.submission",
    "skyward_dask",
    "skyward_joblib",
    *(
        f"skyward.testing.{path.stem}"
        for path in sorted((ROOT / "src/skyward/testing").iterdir())
        if not path.name.startswith("_")
    ),
]
ENTRY = re.compile(r"^\.\. (?:py:data|auto\w+):: ([\w.]+)$((?:\n +:[\w-]+:.*)*)", re.MULTILINE)


def entry(name: str) -> object:
    """Return the object of that full name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def entries() -> Iterator[tuple[str, set[str]]]:
    """Every name that a directive of the reference documents, and the members that it shows."""
    for page in PAGES:
        for name, options in ENTRY.findall(page.read_text(encoding="utf-8")):
            found = entry(name)
            left_out = re.search(r":exclude-members: (.*)", options)
            members = (
                {each for each in dir(found) if not each.startswith("_")}
                - set(left_out[1].split(", ") if left_out else ())
                if ":members:" in options
                else set[str]()
            )
            yield name, members
            if isinstance(found, ModuleType):
                yield from (
                    (f"{name}.{each}", set(dir(entry(f"{name}.{each}")))) for each in members & {*found.__all__}
                )


def test_the_reference_has_every_public_name() -> None:
    known = {id(entry(name)) for name, _ in entries()}
    public = {f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__}

    assert sorted(name for name in public if id(entry(name)) not in known) == []


def test_the_index_lists_every_name_of_the_package_and_every_page() -> None:
    index = (ROOT / "docs/reference/index.md").read_text(encoding="utf-8")
    listed = {id(entry(name)) for name in re.findall(r"^   (skyward[\w.]+)$", index, re.MULTILINE)}

    assert [
        name for name in importlib.import_module("skyward").__all__ if id(entry(f"skyward.{name}")) not in listed
    ] == []
    assert [page.stem for page in PAGES if page.stem != "index" and f"\n{page.stem}\n" not in index] == []


@pytest.fixture(scope="module")
def code_names() -> Iterator[ModuleType]:
    folder = str(ROOT / "docs")
    sys.path.insert(0, folder)
    yield importlib.import_module("extensions.code_names")
    sys.path.remove(folder)


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("ComputePool", "skyward.ComputePool"),
        ("sky.ComputePool(provider=sky.Local(), nodes=2)", "skyward.ComputePool"),
        ("@sky.compute", "skyward.compute"),
        ("pool.submit(fn, x)", "skyward.ComputePool.submit"),
        ("sky.errors.WorkerLostError", "skyward.WorkerLostError"),
        ("skyward.errors.WorkerLostError", "skyward.WorkerLostError"),
        ("skyward.providers.base.Offer", "skyward.providers.Offer"),
        ("Image.mirror()", "skyward.Image.mirror"),
        ("sky.accelerators.T4()", "skyward.accelerators.T4"),
        ("Accelerator.NVIDIA.T4(count=2)", "skyward.accelerators.T4"),
        ("distributed", None),  # Dask's
        ("pool.closed", None),
        ("fn(x) >> pool", None),
        ("nodes=2", None),
    ],
)
def test_inline_code_that_is_a_public_name_leads_to_its_entry(
    code_names: ModuleType, code: str, name: str | None
) -> None:
    known = {
        "skyward.ComputePool",
        "skyward.ComputePool.submit",
        "skyward.Image.mirror",
        "skyward.WorkerLostError",
        "skyward.accelerators.T4",
        "skyward.compute",
        "skyward.distributed",
        "skyward.providers.Offer",
    }

    assert code_names.documented(code, known) == name


@pytest.mark.parametrize(
    ("code", "anchor"),
    [("skyward sweep --all", "skyward-sweep"), ("skyward.sweep", None), ("skyward fly", None), ("skyward", None)],
)
def test_inline_code_that_is_a_command_leads_to_its_section(
    code_names: ModuleType, code: str, anchor: str | None
) -> None:
    assert code_names.command(code) == anchor


def shown() -> Iterator[tuple[str, Any, str]]:
    """Functions, classes, methods and nested classes of the reference, with their docstring, and its class's."""
    for name, members in entries():
        found = entry(name)
        if inspect.isroutine(found) or inspect.isclass(found):
            yield name, found, inspect.getdoc(found) or ""
        for key in members if inspect.isclass(found) else ():
            each = getattr(found, key)
            if (
                not key.startswith("_")
                and callable(each)
                and (getattr(each, "__module__", "") or "").startswith("skyward")
            ):
                yield f"{name}.{key}", each, f"{inspect.getdoc(each)}\n{inspect.getdoc(found)}"


def parameters(found: Any) -> set[str]:
    """Names that a caller passes, and fields that it reads; ``message`` of an error means itself."""
    call = found.__init__ if inspect.isclass(found) else found
    names = set(inspect.signature(call).parameters) if inspect.isroutine(call) else set[str]()
    names |= {field.name for field in fields(found)} if is_dataclass(found) else set()
    own = {"message"} if inspect.isclass(found) and issubclass(found, BaseException) else set()
    return {name for name in names if not name.startswith("_")} - own - {"self", "cls", "args", "kwargs"}


def test_every_parameter_and_field_in_the_reference_is_explained() -> None:
    """Its name is in the docstring, in a section or in a sentence; implementations refer to their seam's."""
    missing: list[str] = []
    for path, found, text in shown():
        words = set(re.findall(r"\w+", text))
        if not text.startswith("See :") and not isinstance(found, enum.EnumType):
            missing += [f"{path}: {name}" for name in sorted(parameters(found) - words)]

    assert missing == []
