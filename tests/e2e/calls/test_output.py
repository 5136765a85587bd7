"""What calls print, and what a pool writes: every line arrives once, whole, in order, and nothing else does."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pytest

import skyward as sky

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PATIENCE_S = 20.0
MIB = 1 << 20
CONTROL_CHARACTERS = {chr(code) for code in (*range(0x20), 0x7F, *range(0x80, 0xA0))} - {"\n"}


class Listener:
    """A callback that keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[sky.SkywardEvent] = []
        self._marks: dict[str, threading.Event] = {}

    def __call__(self, event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.Error) and event.message in self._marks:
            self._marks[event.message].set()
        else:
            self.events.append(event)

    def catch_up(self, pool: sky.ComputePool) -> None:
        """Return when all that was published before has been heard: events are delivered in order."""
        mark = uuid.uuid4().hex
        heard = self._marks[mark] = threading.Event()
        pool.publish(sky.Error(mark))
        assert heard.wait(PATIENCE_S)

    @property
    def lines(self) -> list[str]:
        return [event.line for event in self.events if isinstance(event, sky.LogLine)]


@pytest.fixture(scope="module")
def everything() -> Listener:
    return Listener()


@pytest.fixture(scope="module")
def pool(everything: Listener) -> Iterator[sky.ComputePool]:
    with sky.ComputePool(
        provider=sky.Local(), nodes=1, concurrency=2, display="quiet", on_event=everything, collect_metrics=False
    ) as pool:
        yield pool


@pytest.fixture
def heard(pool: sky.ComputePool, everything: Listener) -> Iterator[Callable[[], list[str]]]:
    """Gives the lines heard since the test began."""
    everything.catch_up(pool)
    everything.events.clear()

    def lines() -> list[str]:
        everything.catch_up(pool)
        return everything.lines

    return lines


@sky.compute
def write(text: str, stream: str = "stdout") -> None:
    getattr(sys, stream).write(text)


def test_calls_that_print_at_once_do_not_mix_within_a_line(
    pool: sky.ComputePool, heard: Callable[[], list[str]]
) -> None:
    @sky.compute
    def print_in_pieces(letter: str) -> None:
        for number in range(200):
            for _ in range(10):
                print(letter, end="", flush=True)
            print(f" {number}")
            time.sleep(0.0005)

    sky.gather(*[print_in_pieces(letter) for letter in "abcd"]) >> pool
    lines = heard()
    for letter in "abcd":
        assert [line for line in lines if letter in line] == [f"{letter * 10} {n}" for n in range(200)]
    assert len(lines) == 4 * 200


def test_threads_of_a_call_do_not_mix_within_a_line(pool: sky.ComputePool, heard: Callable[[], list[str]]) -> None:
    @sky.compute
    def print_in_threads() -> None:
        def speak(letter: str) -> None:
            for number in range(50):
                print(letter, end="")
                time.sleep(0.0002)
                print(number)
            print(letter * MIB, end="")
            time.sleep(0.01)
            print("end")
            print(letter, "without an end", end="")

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(speak, "abc"))

    print_in_threads() >> pool
    lines = heard()
    for letter in "abc":
        expected = [*(f"{letter}{number}" for number in range(50)), letter * MIB + "end", f"{letter} without an end"]
        assert [line for line in lines if line.startswith(letter)] == expected
    assert len(lines) == 3 * 52


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("no end", ["no end"]),
        ("one\n\ntwo\r\nthree", ["one", "", "two", "three"]),
        ("größer ✓ 漢字 🚀\n", ["größer ✓ 漢字 🚀"]),
        ("half a pair: \ud83d\n", ["half a pair: \\ud83d"]),
        ("\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
        ("", []),
    ],
)
def test_text_becomes_lines(
    pool: sky.ComputePool, heard: Callable[[], list[str]], stream: str, text: str, lines: list[str]
) -> None:
    write(text, stream) >> pool
    assert heard() == lines


def test_lines_say_where_they_come_from(pool: sky.ComputePool, everything: Listener) -> None:
    everything.catch_up(pool)
    everything.events.clear()
    before = time.time()
    write("here\n") >> pool
    everything.catch_up(pool)
    (line,) = [event for event in everything.events if isinstance(event, sky.LogLine)]
    assert line.node == 0
    assert line.instance_id.startswith("local-")
    assert before <= line.timestamp <= time.time()


def test_bytes_written_to_the_buffer_are_lines_as_well(pool: sky.ComputePool, heard: Callable[[], list[str]]) -> None:
    @sky.compute
    def write_bytes() -> None:
        for byte in "über\n".encode() + b"\xff\n":
            sys.stdout.buffer.write(bytes([byte]))

    write_bytes() >> pool
    assert heard() == ["über", "\\xff"]


def test_a_progress_bar_is_heard_of_now_and_then_and_at_its_end(
    pool: sky.ComputePool, heard: Callable[[], list[str]]
) -> None:
    @sky.compute
    def progress() -> None:
        for percent in range(101):
            sys.stderr.write(f"\r{percent:3d}%|{'#' * (percent // 10):<10}|")
            sys.stderr.flush()
        sys.stderr.write("\n")

    progress() >> pool
    lines = heard()
    assert lines[0].startswith("  0%|")
    assert lines[-1] == "100%|##########|"
    assert len(lines) <= 4


def test_a_line_of_ten_megabytes_arrives_whole(pool: sky.ComputePool, heard: Callable[[], list[str]]) -> None:
    @sky.compute
    def print_long(copies: int) -> None:
        print("äbcdefghij" * copies, "end")

    print_long(MIB) >> pool
    (line,) = heard()
    assert line == "äbcdefghij" * MIB + " end"


def test_ten_thousand_prints_arrive_in_order(pool: sky.ComputePool, heard: Callable[[], list[str]]) -> None:
    @sky.compute
    def print_often() -> None:
        for number in range(10_000):
            print("line", number, file=sys.stderr if number % 2 else sys.stdout)

    print_often() >> pool
    assert heard() == [f"line {number}" for number in range(10_000)]


def test_lines_arrive_while_the_call_still_runs(
    pool: sky.ComputePool, everything: Listener, heard: Callable[[], list[str]], tmp_path: Path
) -> None:
    @sky.compute
    def wait_for(path: str) -> None:
        print("waiting")
        while not os.path.exists(path):
            time.sleep(0.01)

    running = pool.submit(wait_for, str(tmp_path / "go"))
    deadline = time.monotonic() + PATIENCE_S
    while "waiting" not in everything.lines and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running.done()
    (tmp_path / "go").touch()
    running.result(PATIENCE_S)
    assert heard() == ["waiting"]


def test_what_a_failing_call_printed_arrives(pool: sky.ComputePool, heard: Callable[[], list[str]]) -> None:
    @sky.compute
    def print_and_fail() -> None:
        print("before", end="")
        raise LookupError

    with pytest.raises(LookupError):
        print_and_fail() >> pool
    assert heard() == ["before"]


def test_logging_in_a_call_arrives(pool: sky.ComputePool, heard: Callable[[], list[str]]) -> None:
    @sky.compute
    def log() -> None:
        logger = logging.getLogger("mine")
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        logger.warning("careful")
        logger.removeHandler(handler)

    log() >> pool
    assert heard() == ["careful"]


@pytest.mark.filterwarnings("default")
def test_warnings_of_a_call_arrive(pool: sky.ComputePool, heard: Callable[[], list[str]]) -> None:
    @sky.compute
    def warn() -> None:
        import warnings

        warnings.warn("mind the gap", UserWarning, stacklevel=1)

    warn() >> pool
    assert any("UserWarning: mind the gap" in line for line in heard())


# --- what passes Python by --------------------------------------------------------------------------------------------


def test_output_that_passes_python_by_arrives_in_order_and_is_kept_in_the_workers_log(
    pool: sky.ComputePool, heard: Callable[[], list[str]]
) -> None:
    @sky.compute
    def speak() -> str:
        print("python")
        subprocess.run(["echo", "subprocess"], check=True)
        print("python", 2, file=sys.stderr)
        os.system("echo shell; echo error >&2")
        os.write(1, b"descriptor 1\n")
        os.write(2, b"descriptor 2\n")
        ctypes.CDLL(None).puts(b"C")
        print("python", 3)
        child = os.fork()
        if not child:
            print("forked")
            os._exit(0)
        os.waitpid(child, 0)
        with multiprocessing.get_context("fork").Pool(1) as workers:
            workers.map(print, ["by a process of a Pool"])
        subprocess.run(["echo", "to sys.stdout"], stdout=sys.stdout, check=True)
        print("python", 4, os.isatty(1), sys.stdout.isatty())
        os.write(1, b"no end")
        return os.readlink("/proc/self/fd/1")

    log_file = Path(speak() >> pool)
    captured = ["subprocess", "shell", "error", "descriptor 1", "descriptor 2", "C", "forked"]
    captured += ["by a process of a Pool", "to sys.stdout"]
    expected = ["python", *captured, "no end"]
    for at, line in ((2, "python 2"), (8, "python 3"), (12, "python 4 False False")):
        expected.insert(at, line)
    assert heard() == expected
    assert log_file.name in {"worker-0.log", "worker-1.log"}
    assert set(captured) <= set(log_file.read_text().splitlines())


def test_a_subprocess_is_heard_while_it_still_runs(
    pool: sky.ComputePool, everything: Listener, heard: Callable[[], list[str]], tmp_path: Path
) -> None:
    program = f"echo waiting; while ! test -e {tmp_path / 'go'}; do sleep 0.01; done"
    running = pool.submit(subprocess.run, ["sh", "-c", program])
    deadline = time.monotonic() + PATIENCE_S
    while "waiting" not in everything.lines and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running.done()
    (tmp_path / "go").touch()
    running.result(PATIENCE_S)
    assert heard() == ["waiting"]


def test_a_loud_subprocess_is_heard_whole(pool: sky.ComputePool, heard: Callable[[], list[str]]) -> None:
    pool.submit(subprocess.run, ["seq", "20000"]).result()
    assert heard() == [str(number) for number in range(1, 20_001)]


def test_a_callback_hears_the_subprocesses_of_its_calls_only(
    pool: sky.ComputePool, heard: Callable[[], list[str]]
) -> None:
    listener = Listener()
    pool.submit(os.system, "echo before").result()
    with sky.use_callback(listener):
        pool.submit(os.system, "echo inside").result()
    pool.submit(os.system, "echo after").result()
    assert heard() == ["before", "inside", "after"]
    assert listener.lines == ["inside"]


def test_the_line_that_was_printed_right_before_a_worker_ended_arrives(
    pool: sky.ComputePool, heard: Callable[[], list[str]]
) -> None:
    @sky.compute(retries=0)
    def end() -> None:
        print("about to end")
        os._exit(3)

    with pytest.raises(sky.WorkerLostError, match="status 3"):
        end() >> pool
    assert heard() == ["about to end"]


def test_the_last_words_of_a_worker_that_crashed_arrive_once(
    pool: sky.ComputePool, everything: Listener, heard: Callable[[], list[str]]
) -> None:
    @sky.compute(retries=0)
    def crash() -> None:
        os.write(1, b"about to crash\n")
        ctypes.string_at(0)

    with pytest.raises(sky.WorkerLostError, match="SIGSEGV"):
        crash() >> pool
    lines = heard()
    assert lines[:2] == ["about to crash", "Fatal Python error: Segmentation fault"]
    assert any("in crash" in line for line in lines)
    lost = [isinstance(event, sky.WorkerLost) for event in everything.events]
    assert lost.index(True) > len(lines) - 1


def test_events_emitted_in_a_call_reach_the_pools_callbacks(
    pool: sky.ComputePool, everything: Listener, heard: Callable[[], list[str]]
) -> None:
    @sky.compute
    def report() -> None:
        for step in range(3):
            sky.emit(sky.Progress("epoch", step, 3))

    report() >> pool
    heard()
    epochs = [event for event in everything.events if isinstance(event, sky.Progress) and event.label == "epoch"]
    assert epochs == [sky.Progress("epoch", step, 3) for step in range(3)]


def test_a_callback_around_a_submission_hears_its_lines_once_and_no_others(
    pool: sky.ComputePool, everything: Listener, heard: Callable[[], list[str]]
) -> None:
    listener = Listener()
    pool.submit(print, "before").result()
    with sky.use_callback(listener):
        future = pool.submit(print, "inside")
        sky.gather(*[write(f"gathered {n}\n") for n in range(3)]) >> pool
        write("on every worker\n") @ pool
    pool.submit(print, "after").result()
    future.result()
    assert sorted(heard()) == sorted([*listener.lines, "before", "after"])
    assert sorted(listener.lines) == ["gathered 0", "gathered 1", "gathered 2", "inside", *["on every worker"] * 2]


def test_nested_callbacks_each_hear_a_line_once(pool: sky.ComputePool, heard: Callable[[], list[str]]) -> None:
    outer, inner = Listener(), Listener()
    with sky.use_callback(outer), sky.use_callback(inner):
        write("hello\n") >> pool
    assert heard() == outer.lines == inner.lines == ["hello"]


def test_a_callback_around_the_pool_hears_a_line_once() -> None:
    listener = Listener()
    with sky.use_callback(listener), sky.ComputePool(provider=sky.Local(), display="quiet") as pool:
        write("hello\n") >> pool
    assert listener.lines == ["hello"]
    assert isinstance(listener.events[-1], sky.PoolStopped)


def test_a_callback_that_fails_is_logged_and_breaks_nothing(
    pool: sky.ComputePool, heard: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(event: sky.SkywardEvent) -> None:
        raise RuntimeError("not today")

    with sky.use_callback(refuse):
        write("hello\n") >> pool
    assert heard() == ["hello"]
    assert "not today" in caplog.text


# --- what a script shows ----------------------------------------------------------------------------------------------

SCRIPT = """
import asyncio, logging, sys, time
import skyward as sky
# How long a step of the loop took tells of the machine, which has other things to do.
logging.getLogger("asyncio").addFilter(lambda record: "took" not in record.getMessage())

@sky.compute
def speak(n):
    print("grüße", n)
    sys.stderr.write("bar 1%\\rbar 100%")
    return n

with sky.ComputePool(provider=sky.Local(), nodes=1, concurrency=2, display={display!r}) as pool:
    assert sky.gather(*[speak(n) for n in range(4)]) >> pool == (0, 1, 2, 3)
    {inside}
{after}
"""

LOOSE_ENDS = """
    async def wait():
        return await pool.submit(abs, -1)

    assert asyncio.run(wait()) == 1
    pool.submit(abs, -1).add_done_callback(lambda future: future.exception())
    failed = pool.submit(int, "x")
    executor = pool.executor()
    running = [executor.submit(time.sleep, 30) for _ in range(8)]
"""


def run_script(*, display: str, inside: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", SCRIPT.format(display=display, inside=inside, after=after)],
        capture_output=True,
        timeout=60,
        encoding="utf-8",
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        check=False,
    )


def test_a_quiet_pool_writes_nothing_at_all_and_nothing_at_exit_whatever_was_left_lying_about() -> None:
    done = run_script(display="quiet", inside=LOOSE_ENDS, after="with pool: pool.submit(abs, -1).result()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.full
def test_a_quiet_pool_left_by_sys_exit_writes_nothing() -> None:
    done = run_script(display="quiet", inside="sys.exit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


@pytest.mark.full
def test_an_error_in_the_block_of_a_quiet_pool_shows_its_traceback_alone() -> None:
    done = run_script(display="quiet", inside="raise LookupError('mine')")
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("LookupError: mine\n")


def sources(lines: list[str]) -> set[str]:
    """Where the lines come from; each begins with the time of day."""
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    return {line[9:].partition(" │ ")[0].strip() for line in lines}


def test_in_a_pipe_the_log_is_plain_lines_and_standard_output_is_the_scripts_own() -> None:
    done = run_script(display="log", inside="print('result')")
    assert (done.returncode, done.stdout) == (0, "result\n")
    assert set(done.stderr) & CONTROL_CHARACTERS == set()
    lines = done.stderr.splitlines()
    named = {source for source in sources(lines) if re.fullmatch(r"0/\d \w+#\d", source)}
    assert sources(lines) - named == {"pool", "node 0"}
    assert len(named) == 4
    assert sorted(line.partition(" │ ")[2] for line in lines if "grüße" in line) == [f"grüße {n}" for n in range(4)]
    assert sum("bar 100%" in line for line in lines) == 4
    assert "closed after" in lines[-1]
    assert "4 calls" in lines[-1]


# In `make test`: the script in a pipe above, and fleet/test_exits.py with an error in the block.
@pytest.mark.full
def test_an_error_in_the_block_is_logged_around_and_shown_once() -> None:
    done = run_script(display="log", inside="raise LookupError('mine')")
    shown, _, trace = done.stderr.partition("Traceback (most recent call last):")
    assert {source for source in sources(shown.splitlines()) if "#" not in source} == {"pool", "node 0"}
    assert "closed after" in shown
    assert trace.count("Error") == 1
    assert trace.endswith("LookupError: mine\n")


def test_lines_name_their_worker_their_call_and_their_stream(pool: sky.ComputePool, everything: Listener) -> None:
    @sky.compute
    def named(stream: str) -> int:
        print(f"named on {stream}", file=getattr(sys, stream))
        return sky.instance_info().worker

    everything.catch_up(pool)
    everything.events.clear()
    workers = sky.gather(named("stdout"), named("stderr")) >> pool
    named("stdout") >> pool
    everything.catch_up(pool)
    heard = [event for event in everything.events if isinstance(event, sky.LogLine)]
    assert sorted((line.call, line.stream) for line in heard) == [
        ("named#0", "stdout"),
        ("named#1", "stderr"),
        ("named#2", "stdout"),
    ]
    assert {line.call: line.worker for line in heard if line.call != "named#2"} == dict(
        zip(("named#0", "named#1"), workers, strict=True)
    )


def test_everything_printed_is_delivered_before_the_result_returns(
    pool: sky.ComputePool, everything: Listener, heard: Callable[[], list[str]]
) -> None:
    heard()

    def late(event: sky.SkywardEvent) -> None:
        if isinstance(event, sky.LogLine):
            time.sleep(0.002)
            shown.append(event.line)

    @sky.compute
    def talk(n: int) -> int:
        for part in range(20):
            print(n, part)
        return n

    shown: list[str] = []
    with sky.use_callback(late):
        talk(1) >> pool
        assert shown == [f"1 {part}" for part in range(20)]
        assert pool.submit(talk.local, 2).result() == 2
        assert len(shown) == 40
        with pytest.raises(ZeroDivisionError):
            fail_after_a_line() >> pool
        assert shown[-1] == "about to fail"


@sky.compute
def fail_after_a_line() -> None:
    print("about to fail")
    raise ZeroDivisionError


def test_records_of_logging_reach_the_handlers_here_with_the_levels_set_here(
    pool: sky.ComputePool, everything: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    @sky.compute
    def log_some() -> None:
        logger = logging.getLogger("my.app")
        logger.debug("nobody asked")
        logger.info("step %d", 3, extra={"loss": 0.5})
        logging.getLogger("my.noise").warning("too much")
        library = logging.getLogger("my.library")
        library.addHandler(logging.NullHandler())
        library.warning("retrying")
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            logger.exception("it failed")

    everything.catch_up(pool)
    everything.events.clear()
    logging.getLogger("my.noise").setLevel(logging.ERROR)
    with caplog.at_level(logging.INFO, "my"):
        log_some() >> pool
    mine = [record for record in caplog.records if record.name.startswith("my.")]
    assert [(each.name, each.levelname, each.message) for each in mine] == [
        ("my.app", "INFO", "step 3"),
        ("my.library", "WARNING", "retrying"),
        ("my.app", "ERROR", "it failed"),
    ]
    assert vars(mine[0])["loss"] == 0.5
    assert re.fullmatch(r"0/[01] log_some#0", vars(mine[0])["skyward"])
    assert "ZeroDivisionError" in (mine[2].exc_text or "")
    lines = [event for event in everything.events if isinstance(event, sky.LogLine)]
    assert [(line.level, line.logger, line.call) for line in lines] == [
        (record.levelname, record.name, "log_some#0") for record in mine
    ]

    log_some() >> pool  # its levels here are the default ones again
    assert not [record for record in caplog.records[len(mine) :] if record.message.startswith("step")]


def test_a_call_that_configures_logging_itself_prints_as_it_likes(
    pool: sky.ComputePool, heard: Callable[[], list[str]]
) -> None:
    @sky.compute
    def configure() -> None:
        logging.basicConfig(level=logging.DEBUG, format="OWN %(message)s")
        try:
            logging.getLogger("my.app").debug("its own")
        finally:
            logging.root.handlers.clear()
            logging.root.setLevel(logging.WARNING)

    configure() >> pool
    assert heard() == ["OWN its own"]


KILLED = """
import os, signal, sys, time
import skyward as sky

@sky.compute
def train(epochs):
    for epoch in range(epochs):
        print(f"epoch {epoch}")
    os.system("echo from a subprocess")
    return epochs

with sky.ComputePool(provider=sky.Local(), display="quiet", lease=10, collect_metrics=False) as pool:
    train(3) >> pool
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_output_of_a_client_that_was_killed_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert subprocess.run([sys.executable, "-c", KILLED], timeout=90, check=False).returncode == -signal.SIGKILL
    (folder,) = (tmp_path / "skyward/pools").iterdir()
    try:
        shown = skyward_command("logs", folder.name, "--call", "train#0")
        assert [line.partition(" | ")[2] for line in shown.splitlines()] == [
            *("epoch 0", "epoch 1", "epoch 2", "from a subprocess")
        ]
        assert "worker-0 | " in skyward_command("logs", folder.name, "--system"), "its node lives on for 10 s"
    finally:
        skyward_command("down", folder.name)


def skyward_command(*arguments: str) -> str:
    command = [sys.executable, "-m", "skyward", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
