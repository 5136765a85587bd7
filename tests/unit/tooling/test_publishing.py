"""Files around a release agree with the project: version, workflow, hosting of the docs, forms, changelog."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def document(path: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    return found


def test_the_citation_is_of_this_version() -> None:
    citation = document("CITATION.cff")
    stated = {name: citation[name] for name in ("version", "license", "abstract")}
    expected = {"version": PROJECT["version"], "license": PROJECT["license"], "abstract": PROJECT["description"]}
    assert stated == expected
    assert citation["authors"] == PROJECT["authors"]


def test_the_version_stands_nowhere_else_in_the_sources() -> None:
    version = re.compile(rf"""['"]{re.escape(PROJECT["version"])}['"]""")
    named = [path for path in ROOT.glob("src/**/*.py") if version.search(path.read_text(encoding="utf-8"))]
    assert named == []


def test_the_workflow_runs_targets_of_the_makefile_on_each_python_with_pinned_actions() -> None:
    jobs = document(".github/workflows/ci.yml")["jobs"]
    targets = set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE))
    steps = [step for job in jobs.values() for step in job["steps"]]
    commands = [step["run"].split() for step in steps if "run" in step]

    assert {command[0] for command in commands} == {"make"}
    assert {command[1] for command in commands} == {"check", "test", "demo", "docs", "dist"} <= targets
    assert [step["uses"] for step in steps if "uses" in step and not re.search(r"@[0-9a-f]{40}$", step["uses"])] == []
    classifiers = re.findall(r"Python :: (3\.\d+)'", str(PROJECT["classifiers"]))
    assert jobs["test"]["strategy"]["matrix"]["python"] == classifiers == jobs["macos"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={classifiers[0]}"


def test_the_workflow_gives_code_of_others_no_rights() -> None:
    workflow = document(".github/workflows/ci.yml")
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    checkouts = [step for job in workflow["jobs"].values() for step in job["steps"] if "checkout@" in str(step)]

    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())
    assert [word for word in ("pull_request_target", "workflow_run", "secrets.", "github.event.") if word in text] == []
    assert [step for step in checkouts if step["with"]["persist-credentials"] is not False] == []
    assert len(checkouts) == len(workflow["jobs"])


def test_the_hosted_site_is_built_like_the_one_of_make_docs() -> None:
    hosting = document(".readthedocs.yaml")
    (needs,) = re.findall(r"^docs_needs := (.*)$", MAKEFILE, re.MULTILINE)
    assert f"python -m pip install {needs}" in hosting["build"]["jobs"]["install"]
    assert (ROOT / hosting["sphinx"]["configuration"]).is_file()
    assert hosting["sphinx"]["fail_on_warning"], "as make docs, with -W"


def test_each_form_of_an_issue_has_fields_of_their_own_names() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 2
    for path in forms:
        form = document(str(path.relative_to(ROOT)))
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert form["name"]
        assert form["description"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert all(field["attributes"]["label"] for field in fields)


def test_the_changelog_has_a_section_for_each_version_the_newest_one_first() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert all(released), headings
    versions = [tuple(map(int, each.groups())) for each in released if each]
    assert versions == sorted(versions, reverse=True)
    assert tuple(map(int, PROJECT["version"].split("."))) >= max(versions, default=(0,))


def test_changes_are_of_the_kinds_of_keep_a_changelog() -> None:
    kinds = re.findall(r"^### (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(kinds) <= SECTIONS
