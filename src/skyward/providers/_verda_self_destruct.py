"""Program on a machine that deletes the machine, once its time is over or its client has died.

Runs as root, with the standard library only. An argument is the renewal for which it was scheduled: after a newer one
it ends at once. If nothing deletes the machine within ten minutes, for lack of a valid bearer, it is powered off.
"""

import contextlib
import json
import os
import sys
import threading
import urllib.request
from typing import Any

FACTS: dict[str, str] = {}


def ask(method: str, path: str, body: object = None) -> Any:
    """Return the answer to one call."""
    headers = {"Authorization": f"Bearer {FACTS['secret']}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(FACTS["url"] + path, data, headers, method=method)  # noqa: S310 - a checked URL
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - the same
        text = answer.read()
    return json.loads(text) if text else None


def delete() -> None:
    """Request the deletion of the machine, of its volumes and of its startup script."""
    for row in ask("GET", "/instances"):
        if row.get("hostname") == FACTS["hostname"]:
            with contextlib.suppress(OSError, ValueError):  # an earlier attempt may have deleted it
                if row.get("startup_script_id"):
                    ask("DELETE", "/scripts", {"scripts": [row["startup_script_id"]]})
            order = {"id": row["id"], "action": "delete", "delete_permanently": True}
            volumes = {row.get("os_volume_id"), *(row.get("volume_ids") or ())} - {None, ""}
            ask("PUT", "/instances", {**order, "volume_ids": sorted(volumes)} if volumes else order)


if __name__ == "__main__" and sys.argv[1:] in ([], [FACTS.get("renewal", "")]):
    for _ in range(20):
        try:
            delete()
        except (OSError, ValueError, LookupError) as error:
            sys.stderr.write(f"not deleted: {error}\n")
        threading.Event().wait(30)
    os.execvp("shutdown", ["shutdown", "-h", "now"])  # noqa: S606, S607 - no shell; a minimal image has it anywhere
