"""A pool in a notebook, as JupyterLab runs it: cells share it, and what they show is what is saved."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import psutil
import pytest

from skyward.ledger.fleet_record import FleetFolder
from support.eventually import eventually

SECRET = "sk-not-for-anyone"

OPEN = """
import os, signal
import skyward as sky

@sky.compute
def twice(number):
    print("twice", number)
    return 2 * number

@sky.compute
def tell(): return "before"

@sky.compute
def hang():
    import time
    print("hanging")
    time.sleep(600)

def interrupt(event):
    if "hanging" in event.line:
        os.kill(os.getpid(), signal.SIGINT)

pool = sky.ComputePool(provider=sky.Local(), image=sky.Image(env={"API_KEY": os.environ["API_KEY"]}))
pool.open();
"""

CELLS = {
    "open": OPEN,
    "call": "twice(4) >> pool",
    "before": "tell() >> pool",
    "define": "@sky.compute\ndef tell(): return 'after'",
    "after": "tell() >> pool",
    "await": "future = pool.submit(twice, 5)\nawait future",
    "future": "future",
    "failed": "failed = pool.submit(int, 'x')\nfailed.exception()\nfailed",
    "interrupt": "pool.on(sky.LogLine, interrupt)\nhang() >> pool",
    "after the interrupt": "twice(6) >> pool",
    "async with": "async with sky.ComputePool(provider=sky.Local(), display='spinner') as other:\n"
    "    print(await other.submit(abs, -3))",
    "pool": "display(pool)\npool._request.image",
    "state": "pool",
    "open again": "pool.open()",
    "helper": "def fraction(number):\n    return 1 / number",
    "call fails": "sky.compute(fraction)(0) >> pool",
    "map fails": "list(pool.map(fraction, [1, 0]))",
    "future fails": "await pool.submit(fraction, 0)",
    "with fails": "with sky.ComputePool(provider=sky.Local(), accelerator='A100', display='quiet'):\n    pass",
    "open fails": "sky.ComputePool(provider=sky.Local(), accelerator='A100', display='quiet').open()",
    "worker": "sky.compute(os.getpid)() >> pool",
}

# In a process of its own: the client of a kernel leaves threads and sockets behind.
DRIVER = """
import json, sys
import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
kernel = KernelManager(kernel_name="python3", transport="ipc")  # no port that somebody else may have
kernel.shutdown_wait_time = 100.0  # it kills afterwards, here before a slow machine has closed the pool
client = NotebookClient(nbformat.v4.new_notebook(cells=cells), km=kernel, timeout=200, allow_errors=True)
with client.setup_kernel():
    for index, cell in enumerate(cells):
        client.execute_cell(cell, index)
    kernel.shutdown_kernel(restart=True)
kernel.cleanup_connection_file()
print(nbformat.writes(client.nb))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, own_home: Any) -> str:
    """The notebook as it is saved, after its kernel was shut down for a restart."""
    del own_home
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_KEY", SECRET)
        done = subprocess.run(
            [sys.executable, "-c", DRIVER],
            input=json.dumps(list(CELLS.values())),
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path_factory.mktemp("notebook"),
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Outputs:
    """The outputs of one cell."""

    def __init__(self, outputs: list[dict[str, Any]]) -> None:
        self.all = outputs

    def lines(self, stream: str) -> list[str]:
        """Return the lines of a stream, without time and source."""
        text = "".join("".join(each["text"]) for each in self.all if each.get("name") == stream)
        return [line.partition("│ ")[2] or line for line in text.splitlines()]

    def shown(self, output_type: str = "execute_result", kind: str = "text/plain") -> list[str]:
        """Return the results, or the outputs that change."""
        return ["".join(each["data"][kind]) for each in self.all if each["output_type"] == output_type]

    @property
    def errors(self) -> list[str]:
        """Names and messages of errors."""
        return [f"{each['ename']}: {each['evalue']}" for each in self.all if each["output_type"] == "error"]

    @property
    def tracebacks(self) -> list[str]:
        """Tracebacks of errors, without colours."""
        shown = ("\n".join(each["traceback"]) for each in self.all if each["output_type"] == "error")
        return [re.sub(r"\x1b\[[0-9;]*m", "", each) for each in shown]


@pytest.fixture(scope="module")
def cells(saved: str) -> dict[str, Outputs]:
    outputs = [Outputs(cell["outputs"]) for cell in json.loads(saved)["cells"]]
    return dict(zip(CELLS, outputs, strict=True))


def test_opening_is_one_output_and_nothing_is_red(cells: dict[str, Outputs]) -> None:
    (text,) = cells["open"].shown("display_data")
    (html,) = cells["open"].shown("display_data", "text/html")

    assert "open: 1 node, 1 worker" in text
    assert html.startswith("<pre")
    assert len(cells["open"].all) == 1


def test_printed_lines_are_in_the_cell_that_runs_the_call(cells: dict[str, Outputs]) -> None:
    assert cells["call"].shown() == ["8"]
    assert cells["call"].lines("stdout") == ["twice 4"]
    assert not any(outputs.lines("stderr") for outputs in cells.values())


def test_a_function_that_is_defined_again_is_the_one_that_runs(cells: dict[str, Outputs]) -> None:
    assert (cells["before"].shown(), cells["after"].shown()) == (["'before'"], ["'after'"])


def test_calls_are_awaited_at_the_top_of_a_cell(cells: dict[str, Outputs]) -> None:
    assert cells["await"].shown() == ["10"]
    assert cells["async with"].lines("stdout") == ["3"]
    assert "closed after" in cells["async with"].shown("display_data")[0]


def test_futures_show_their_state(cells: dict[str, Outputs]) -> None:
    (future,), (failed,) = (cells[name].shown(kind="text/html") for name in ("future", "failed"))

    assert "<b>twice#1</b> · finished · " in future
    assert "ValueError: invalid literal for int()" in failed


def test_an_interrupt_ends_the_call_and_the_pool_goes_on(cells: dict[str, Outputs]) -> None:
    assert cells["interrupt"].errors == ["KeyboardInterrupt: "]
    assert cells["after the interrupt"].shown() == ["12"]


def test_a_pool_shows_its_workers_and_calls(cells: dict[str, Outputs]) -> None:
    (html,) = cells["state"].shown("display_data", "text/html")
    assert "1 node, 1 worker" in html
    assert "failed" in html
    assert "<table>" in html


def test_opening_it_twice_is_an_error_that_says_so(cells: dict[str, Outputs]) -> None:
    (error,) = cells["open again"].errors
    assert "the pool is already open" in error


@pytest.mark.parametrize("name", ["call fails", "map fails", "future fails"])
def test_the_error_of_a_call_shows_the_users_lines_there_and_here_and_no_others(
    cells: dict[str, Outputs], name: str
) -> None:
    (shown,) = cells[name].tracebacks
    here = shown.partition("direct cause of the following exception")[2]

    assert "in fraction\n    return 1 / number\n" in shown
    assert re.findall(r"^---*> \d+ (.*)$", here, re.MULTILINE) == [CELLS[name]]
    assert not re.search("skyward/|tenacity|concurrent/|site-packages", shown)


@pytest.mark.parametrize("name", ["with fails", "open fails", "open again"])
def test_an_error_of_opening_shows_the_users_line_only(cells: dict[str, Outputs], name: str) -> None:
    (shown,) = cells[name].tracebacks

    assert re.findall(r"^---*> \d+ (.*)$", shown, re.MULTILINE) == [CELLS[name].partition("\n")[0]]
    assert not re.search("skyward/|tenacity|concurrent/|site-packages", shown)


def test_what_is_saved_has_no_secret(saved: str) -> None:
    assert "API_KEY" in saved
    assert SECRET not in saved


def test_a_restart_of_the_kernel_ends_the_machines(cells: dict[str, Outputs]) -> None:
    (pid,) = cells["worker"].shown()
    assert not psutil.pid_exists(int(pid))


KEPT = """
import skyward as sky
pool = sky.ComputePool(provider=sky.Local(), name="notebook", keep="10m", display="quiet").open()
print(pool.status.nodes[0].instance_id, sky.compute(abs)(-3) >> pool)
"""

RESTARTS = """
import sys
import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

source = sys.stdin.read()
for _ in range(2):
    kernel = KernelManager(kernel_name="python3", transport="ipc")
    client = NotebookClient(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), km=kernel, timeout=200)
    with client.setup_kernel():
        client.execute_cell(client.nb.cells[0], 0)
        kernel.shutdown_kernel(now=True)  # as a restart does with a kernel that does not end
    kernel.cleanup_connection_file()
    print(client.nb.cells[0].outputs[0].text, end="")
"""


def test_a_kept_fleet_is_taken_over_by_the_same_cell_after_a_restart_of_the_kernel() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESTARTS], input=KEPT, capture_output=True, text=True, check=False, timeout=300
    )
    down = subprocess.run([sys.executable, "-m", "skyward", "down", "notebook"], capture_output=True, check=False)
    for attempt in eventually(30.0):
        with attempt:
            assert not FleetFolder("notebook").has_keeper()

    assert done.returncode == down.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("local-")
