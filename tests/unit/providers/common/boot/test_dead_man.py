"""Programs by which machines end their own bill: newer deliveries replace former ones."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from skyward.providers._common.logins import make_key_pair
from skyward.providers._common.machine_boot import DeadMan, boot_script, first_delivery

PROGRAM = """\
import json, pathlib, sys
FACTS: dict[str, str] = {}
if sys.argv[1:] in ([], [FACTS["renewal"]]):
    (pathlib.Path(__file__).parent / "ran").write_text(json.dumps(FACTS))
"""
SYSTEMD_RUN = """\
#!/bin/sh
echo "$@" >>"$RUNS"
"""


def installed(tmp_path: Path) -> DeadMan:
    source = tmp_path / "source.py"
    source.write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "systemd-run").write_text(SYSTEMD_RUN, encoding="utf-8")
    (tmp_path / "systemd-run").chmod(0o755)
    return DeadMan(program=source, path=f"{tmp_path}/a folder/end.py", stale_s=3000)


def run(tmp_path: Path, *command: str, stdin: str = "") -> None:
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RUNS": str(tmp_path / "runs")}
    subprocess.run(command, input=stdin, text=True, env=env, check=True, timeout=30)


def test_only_the_run_of_the_last_delivery_ends_the_machine(tmp_path: Path) -> None:
    dead_man = installed(tmp_path)
    first, second = [dead_man.delivery({"url": "u"}, secret, renewed_s=1.0) for secret in ("old", "new")]
    for each in (first, second):
        run(tmp_path, *each.command, stdin=each.value)
    scheduled = (tmp_path / "runs").read_text(encoding="utf-8").splitlines()
    assert [each.split()[:2] for each in scheduled] == [["--no-block", "--on-active=3000"]] * 2
    former, latter = [each.split()[-1] for each in scheduled]

    run(tmp_path, *dead_man.end, former)
    assert not (tmp_path / "a folder/ran").exists()
    run(tmp_path, *dead_man.end, latter)

    facts = json.loads((tmp_path / "a folder/ran").read_text(encoding="utf-8"))
    assert facts == {"url": "u", "secret": "new", "renewal": latter}
    assert (tmp_path / "a folder/end.py").stat().st_mode & 0o777 == 0o600


def test_the_secret_is_in_the_value_only(tmp_path: Path) -> None:
    delivery = installed(tmp_path).delivery({}, "a-secret", renewed_s=1.0)
    assert "a-secret" in delivery.value
    assert "a-secret" not in repr(delivery) + repr(delivery.command)


def test_a_first_boot_script_is_valid_shell_and_delivers_before_everything_else(tmp_path: Path) -> None:
    delivery = installed(tmp_path).delivery({"quote": "it's"}, "a-secret", renewed_s=1.0)
    first = first_delivery(delivery)
    script = boot_script(host_key=make_key_pair(), time_to_live_s=60.0, end=("python3", "/end.py"), first=first)
    run(tmp_path, "sh", "-n", stdin=script)
    run(tmp_path, "sh", stdin=first)
    assert script.index("END_OF_SECRET") < script.index("life=180") < script.index("ssh_host_ed25519_key")
    assert (tmp_path / "a folder/end.py").read_text(encoding="utf-8") == delivery.value
