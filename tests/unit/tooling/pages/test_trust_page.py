"""docs/trust.md has the folders that the client writes to, and the hosts besides vendors that it or a node asks."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from skyward.providers._common.logins import ADDRESS_URL

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/trust.md").read_text(encoding="utf-8")
HOME = {"state": "~/.local/state", "cache": "~/.cache", "data": "~/.local/share"}
FOLDER = re.compile(r'user_(state|cache|data)_path\("skyward"\)(?: / "([\w.]+)")?')
ON_NODES = {"mig"}
"""Written by nodes: docs/accelerators.md has it."""


def test_every_folder_of_the_client_is_on_the_page() -> None:
    listed = re.findall(r"^\| `(~/[^`]+)`", PAGE, re.MULTILINE)
    used = {
        f"{HOME[kind]}/skyward/{name}"
        for path in (ROOT / "src").rglob("*.py")
        for kind, name in FOLDER.findall(path.read_text(encoding="utf-8"))
        if name and name not in ON_NODES
    }

    assert len(used) > 4
    assert [folder for folder in used if not any(folder.startswith(place) for place in listed)] == []


def test_hosts_that_are_asked_besides_vendors_are_on_the_page() -> None:
    script = (ROOT / "src/skyward/environment/bootstrap.sh").read_text(encoding="utf-8")
    fetched = re.findall(r"curl .*?https://([\w.]+)", script)

    assert fetched
    assert [host for host in {*fetched, urlsplit(ADDRESS_URL).hostname} if f"`{host}`" not in PAGE] == []
