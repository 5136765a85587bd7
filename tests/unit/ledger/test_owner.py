"""Which owners a process can judge, and how."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from skyward.ledger.ownership import Owner

HOST = "pid:[4026531836]"
CONTAINER = "pid:[4026532201]"
ME = Owner.this_process()
HERE = replace(ME, host="gpu1", machine="m1", boot="b1", namespace=HOST)


@pytest.mark.parametrize(
    ("owner", "here", "lives"),
    [
        pytest.param(HERE, HERE, True, id="this process"),
        pytest.param(replace(HERE, started="0"), HERE, False, id="the number is another process's by now"),
        pytest.param(replace(HERE, host="gpu2"), HERE, None, id="another machine"),
        pytest.param(replace(HERE, namespace=CONTAINER), HERE, None, id="in a container, seen from the machine"),
        pytest.param(HERE, replace(HERE, namespace=CONTAINER), None, id="on the machine, seen from a container"),
        pytest.param(replace(HERE, boot="b0"), HERE, False, id="before a reboot"),
        pytest.param(replace(HERE, boot="b0", machine="m2"), HERE, None, id="another machine with the same name"),
        pytest.param(
            replace(HERE, boot="b0", namespace=CONTAINER),
            replace(HERE, namespace=CONTAINER),
            None,
            id="containers of two machines whose namespaces have the same number",
        ),
        pytest.param(replace(HERE, namespace="", boot="", machine=""), HERE, None, id="of an earlier version"),
        pytest.param(
            replace(HERE, namespace="", boot="", machine=""),
            replace(HERE, namespace="", boot="", machine=""),
            True,
            id="a system without /proc",
        ),
    ],
)
def test_only_an_owner_that_can_be_seen_is_judged(owner: Owner, here: Owner, lives: bool | None) -> None:
    assert owner.lives(here) is lives


def test_a_process_in_another_pid_namespace_does_not_judge_this_one() -> None:
    judge = f"from skyward.ledger.ownership import Owner; print(Owner(**{asdict(ME)!r}).lives())"
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", judge]
    judged = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "Operation not permitted" in judged.stderr:
        pytest.skip("making a PID namespace needs root")

    assert judged.stdout == "None\n", judged.stderr
