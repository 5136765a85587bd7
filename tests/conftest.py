"""What every test gets: a home of its own, a check that it leaves nothing behind, and no silent skips in CI."""

from __future__ import annotations

import gc
import os
import pwd
import signal
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing import current_process
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
from uv import find_uv_bin

import skyward as sky
from process_state import kept_state
from skyward.environment.package_sources import pip_settings
from skyward.fleet import template_process
from skyward.shipping.received_modules import SourceFinder
from support.clouds.aws_clients import remember_classes
from support.clouds.compiled_packages import keep_compiled
from support.eventually import eventually

pytest_plugins = ["forked_runs"]

SETTLE_S = 10.0
"""How long what a test started may take to end by itself after the test."""

KEPT_THREADS = ("Dask-Offload",)  # distributed's pool for (de)serialization
"""Prefixes of the names of threads that live as long as the process does."""

LONGEST = (
    "conformance/test_joblib_suite.py",
    "test_docs.py",
    "unit/fleet/test_fleet_properties.py",
    "unit/providers/aws/",
    "unit/tooling/test_probe_cloud.py",
    "e2e/joblib/test_demos.py",
    "e2e/clouds/",
    "e2e/machines/",
)
"""Files, and folders of them, that take longer than one would think by their place."""

_INTERNET = (socket.AF_INET, socket.AF_INET6)

ROLES = ("sky-worker", "sky-zygote", "sky-dask")
"""Names of the processes that a node starts by itself."""

SKIPS = Path(__file__).with_name("skips.txt")


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Point everything that a user owns at an empty folder, before anything reads it."""
    home = tmp_path_factory.mktemp("home")
    places = {
        "HOME": home,
        "TMPDIR": home / "tmp",
        "XDG_CACHE_HOME": home / ".cache",
        "XDG_CONFIG_HOME": home / ".config",
        "XDG_DATA_HOME": home / ".local/share",
        "XDG_RUNTIME_DIR": home / "run",
        "XDG_STATE_HOME": home / ".local/state",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, path in places.items():
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            patch.setenv(name, str(path))
        patch.setattr(tempfile, "tempdir", None)
        # This process has imported the packages of all tests: nodes of each test would get them.
        patch.setenv("SKYWARD_MIRROR", "0")
        yield home


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Let Ctrl-C arrive as it does in a terminal, although a shell's background jobs ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing(own_home: Path) -> Iterator[None]:
    """Catch what fixtures that outlive a test leave behind."""
    yield from _leaving_nothing()


@pytest.fixture(autouse=True)
def leaves_nothing(own_home: Path) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process, a listening socket or a temporary file behind."""
    yield from _leaving_nothing()


@pytest.fixture(scope="module", autouse=True)
def module_leaves_state(own_home: Path) -> Iterator[None]:
    """Fail a file whose fixtures leave the process changed."""
    yield from kept_state()


@pytest.fixture(autouse=True)
def leaves_state(own_home: Path) -> Iterator[None]:
    """Fail a test that leaves the process changed: which test comes next depends on the processes' pace."""
    yield from kept_state()


@pytest.fixture(autouse=True)
def forgets_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Unload what a test imported from a temporary folder, and the finders of modules that were sent."""
    folder = str(tmp_path_factory.getbasetemp())
    before, finders = _temporary_modules(folder), [*sys.meta_path]
    yield
    sys.meta_path[:] = [each for each in sys.meta_path if each in finders or not isinstance(each, SourceFinder)]
    for name in _temporary_modules(folder) - before:
        del sys.modules[name]


def _temporary_modules(folder: str) -> frozenset[str]:
    """Return the names of modules from a folder; after most tests nothing was imported, and the last answer holds."""
    if (seen := (next(reversed(sys.modules)), len(sys.modules))) != _Last.modules_seen:
        _Last.modules_seen = seen
        _Last.temporary_modules = frozenset(
            name
            for name, module in [*sys.modules.items()]
            if (getattr(module, "__file__", None) or "").startswith(folder)
        )
    return _Last.temporary_modules


@pytest.fixture(scope="session")
def start_callbacks() -> Callable[[sky.ComputePool], None]:
    """For fixtures whose pools outlive a test: have the pool start its thread for callbacks now, not during a test."""
    return _start_callbacks


def _start_callbacks(pool: sky.ComputePool) -> None:
    ran_in: SimpleQueue[threading.Thread] = SimpleQueue()
    for _ in range(100):
        pool.submit(abs, 1).add_done_callback(lambda _: ran_in.put(threading.current_thread()))
        if ran_in.get(timeout=SETTLE_S) is not threading.current_thread():
            return
    raise AssertionError("every call was over before it was given its callback, which then runs at once")


@pytest.fixture(scope="session")
def ssh_cache() -> Iterator[Path]:
    """Where test hosts keep environments: one folder for all of them, which outlives the session.

    It holds this environment's uv, and ``pip.conf``: what pip is told here, for hosts that are started with it as
    ``PIP_CONFIG_FILE``.
    """
    folder = Path(__file__).parents[1] / "build/ssh-cache"
    for name in ("cache", "sent"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    _replace_link(folder / "sent/uv", find_uv_bin())
    home = {"HOME": pwd.getpwuid(os.getuid()).pw_dir, "XDG_CONFIG_HOME": ""}
    settings = pip_settings(os.environ | home).items()
    lines = [f"{name} = {' '.join(value.split())}" for name, value in settings]
    (folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]), encoding="utf-8")
    yield folder
    keep_compiled(folder)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, ssh_cache: Path) -> Iterator[Path]:
    """A home in which `ssh gpu1` and `ssh gpu2` work, as pages and examples have it."""
    from skyward.testing.hosts import SshHost, share_cache, write_known_hosts

    folder = tmp_path_factory.mktemp("lab")
    config = folder / "home/.ssh/config"
    config.parent.mkdir(parents=True, mode=0o700)
    env = {"PIP_CONFIG_FILE": str(ssh_cache / "pip.conf")}
    with (
        SshHost(folder / "gpu1", address="127.0.0.2", env=env) as first,
        SshHost(folder / "gpu2", address="127.0.0.3", env=env) as second,
    ):
        write_known_hosts(config.with_name("known_hosts"), first, second)
        for name, host in (("gpu1", first), ("gpu2", second)):
            share_cache(host.home, ssh_cache)
            with config.open("a", encoding="utf-8") as file:
                file.write(f"Host {name}\n  HostName {host.address}\n  Port {host.port}\n")
                file.write(f"  IdentityFile {host.key_path}\n  IdentitiesOnly yes\n")
        yield folder / "home"


@pytest.fixture(scope="module")
def aws_server() -> Iterator[str]:
    """The address of a moto of one's own: S3 and the like, with nothing in it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def user_s3(aws_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The user's client of that S3, with the user's keys in this process's environment."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": aws_server,
        "AWS_ACCESS_KEY_ID": "AKIAUSERSOWN",
        "AWS_SECRET_ACCESS_KEY": "the-users-own-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    yield client
    client.close()


def _replace_link(link: Path, target: str) -> None:
    """At once, for other sessions that use it."""
    new = link.with_name(f"{link.name}.{os.getpid()}")
    new.symlink_to(target)
    new.replace(link)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first unit test, end what pools were forked from: to look for other children takes as long as it.

    Before each file, have the garbage collector pass over what is there by then: it took 4 % of the tests' time.
    """
    if item.path != _Last.file:
        gc.collect()
        gc.freeze()
        _Last.file = item.path
    folder = item.path.relative_to(SKIPS.parent).parts[0]
    if folder == "unit" != _Last.folder:
        template_process._templates.close()
    _Last.folder = folder


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import once what tests of many files import: processes that are forked afterwards have it."""
    if session.config.getoption("--processes"):
        with suppress(ImportError):  # environments that test other parts have less
            remember_classes()
            for name in ("moto.ec2", "openapi_core", "sklearn.model_selection"):
                import_module(name)


class LeakError(AssertionError):
    """Something that was not there before the test is still there after it."""


class _Last:
    """What this process held after its last test, None once a fixture outlives its test; and that test's place.

    The newest module and the number of modules say whether one was imported since they were looked at.
    """

    held: frozenset[str] | None = None
    folder = ""
    file: Path | None = None
    modules_seen: tuple[str, int] | None = None
    temporary_modules: frozenset[str] = frozenset()


def _leaving_nothing() -> Iterator[None]:
    before = _Last.held if _Last.held is not None else _held()
    yield
    for attempt in eventually(SETTLE_S, LeakError):
        with attempt:
            _Last.held = _held()
            if left := _Last.held - before:
                raise LeakError("left behind: " + ", ".join(sorted(left)))


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """Count again what is held before the next test, since fixtures that outlive tests may hold what tests may not."""
    if fixturedef.scope != "function":
        _Last.held = None


def _held() -> frozenset[str]:
    return frozenset([*_threads(), *_children(), *_listeners(), *_temporary_files()])


def _threads() -> Iterator[str]:
    threads = threading.enumerate()
    loop_runs = any(thread.name == "skyward-loop" for thread in threads)  # a fixture's pool; its helpers end with it
    kept = (*KEPT_THREADS, "asyncio_", "skyward-ssh_") if loop_runs else KEPT_THREADS
    # By name and number: a thread may hand its work over to another one of its name (skyward.events.bus).
    for name, number in Counter(thread.name for thread in threads if not thread.name.startswith(kept)).items():
        yield from (
            f"thread {name}" if each == 1 else f"thread {name}, {each} of them" for each in range(1, number + 1)
        )


def _children() -> Iterator[str]:
    for child in _descendants(psutil.Process()):
        try:
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "import run_template" in command:  # nodes of Local() are forked from it; it ends with this process
            continue
        if (node := _node(child)) and child.name() in ROLES:  # of a fixture's; workers are replaced while it lives
            yield f"processes of node {node}"
        elif "multiprocessing.resource_tracker" not in command and "loky.backend.resource_tracker" not in command:
            yield f"process {child.pid} ({command[:120] or 'a zombie'})"


def _descendants(process: psutil.Process) -> Iterator[psutil.Process]:
    """Ask the kernel for the children of each thread: psutil reads a file of every process of the machine."""
    for child in _children_of(process):
        yield child
        yield from _descendants(child)


def _children_of(process: psutil.Process) -> Sequence[psutil.Process]:
    with suppress(OSError, psutil.NoSuchProcess):  # no such files here, or a thread or child has just ended
        pids = _child_pids(process)
        if pids == _child_pids(process):  # where one ends meanwhile the kernel may leave out another
            return [psutil.Process(pid) for pid in pids]
    with suppress(psutil.NoSuchProcess):
        return process.children()
    return ()


def _child_pids(process: psutil.Process) -> set[int]:
    threads = [*Path(f"/proc/{process.pid}/task").iterdir()]
    return {int(pid) for thread in threads for pid in (thread / "children").read_text(encoding="ascii").split()}


def _node(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("SKYWARD_INSTANCE")
    except psutil.Error:
        return None


def _listeners() -> Iterator[str]:
    """Ask each descriptor, in 0.06 ms: the kernel's table of all connections took psutil 6 ms after every test."""
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # no socket, or closed by now
            looked_at = socket.socket(fileno=int(name))
            try:
                if looked_at.family in _INTERNET and looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    host, port, *_ = looked_at.getsockname()
                    yield f"listening socket {host}:{port}"
            finally:
                looked_at.detach()


def _temporary_files() -> Iterator[str]:
    own = current_process()._config.get("tempdir")  # type: ignore[attr-defined]  # multiprocessing removes it at exit
    for entry in os.scandir(tempfile.gettempdir()):
        if entry.path != own:
            yield f"temporary file {entry.path}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files go to processes whole, in this order: what takes minutes must not begin last.

    Unit tests are last, since before the first one a process ends what its pools were forked from, and another pool
    would need it again.
    """

    def turn(item: pytest.Item) -> tuple[bool, bool]:
        path = item.path.relative_to(SKIPS.parent).as_posix()
        return path.startswith("unit/"), not path.startswith(LONGEST)

    items.sort(key=turn)


@cache
def _allowed_skips() -> frozenset[str]:
    lines = SKIPS.read_text(encoding="utf-8").splitlines()
    return frozenset(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    skipped = report.outcome == "skipped" and not hasattr(report, "wasxfail")
    if skipped and os.environ.get("CI") == "true" and report.nodeid not in _allowed_skips():
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, and {SKIPS.name} does not say why it may be: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """In CI a skipped test is a failed one, unless tests/skips.txt lists it."""
    report = yield
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same for a file that skips itself as a whole."""
    report = yield
    _refuse_skip(report)
    return report
