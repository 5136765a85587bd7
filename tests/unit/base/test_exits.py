"""How a process with pools ends: which signals unwind it, what they do before and after, what is called at its exit."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from skyward.base import exits
from skyward.base.exits import arm, disarm, hold, release, uninterrupted

SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]

SETUP = """
import os, signal, sys, threading
from contextlib import contextmanager
from skyward.base.exits import arm, at_exit, disarm, hold, release, uninterrupted

def send(name):
    os.kill(os.getpid(), getattr(signal, name))

@contextmanager
def pool():
    hold()
    try:
        yield
    finally:
        release()
        print("closed", flush=True)
"""


def run(program: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        # From Python 3.12 on a warning advises against forks of a process with threads, and these are such forks.
        [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", SETUP + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=restore_signals,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.split()


def restore_signals() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def defaults() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_unwinds_the_block_and_ends_the_process_with_the_usual_status(name: str, status: int) -> None:
    assert run(f"with pool(): send('{name}')\nprint('not reached')") == (status, ["closed"])


def test_without_a_pool_and_after_the_last_one_signals_do_what_they_always_did() -> None:
    assert run("with pool(): pass\nsend('SIGTERM')\nprint('not reached')") == (-15, ["closed"])


def test_of_two_pools_the_last_counts() -> None:
    assert run("with pool():\n    with pool(): pass\n    send('SIGTERM')") == (143, ["closed", "closed"])


def test_the_applications_own_handlers_are_never_replaced(defaults: None) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    mine = signal.getsignal(signal.SIGTERM)

    hold()
    with uninterrupted():
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    release()

    assert signal.getsignal(signal.SIGTERM) is mine


def test_a_handler_set_while_a_pool_is_open_stays(defaults: None) -> None:
    hold()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    release()

    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN, signal.SIG_DFL, signal.SIG_DFL]


def test_another_thread_leaves_signals_alone_unless_the_main_thread_has_armed_them(defaults: None) -> None:
    def in_a_thread(function: object) -> None:
        thread = threading.Thread(target=function)  # type: ignore[arg-type]
        thread.start()
        thread.join()

    in_a_thread(hold)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    arm()
    with pytest.raises(SystemExit) as raised:
        os.kill(os.getpid(), signal.SIGTERM)
    assert raised.value.code == 143
    disarm()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "the pool is still open"
    in_a_thread(release)
    disarm()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_pool_closed_by_another_thread_leaves_a_signal_its_default_effect() -> None:
    program = """
        hold()
        thread = threading.Thread(target=release)
        thread.start()
        thread.join()
        send("SIGTERM")
        print("not reached")
    """
    assert run(program) == (-15, [])


@pytest.mark.parametrize(
    ("sent", "raised"), [("SIGINT", "KeyboardInterrupt"), ("SIGTERM", "SystemExit"), ("SIGHUP", "SystemExit")]
)
def test_what_comes_while_pools_are_closed_is_heard_afterwards(sent: str, raised: str) -> None:
    program = f"""
        hold()
        try:
            with uninterrupted():
                send("{sent}")
                send("SIGINT")
                release()
                print("all")
        except BaseException as error:
            print(type(error).__name__)
            print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
            print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    assert run(program) == (0, ["all", raised, "True", "True"])


def test_sigterm_while_handlers_are_restored_leaves_ctrl_c_delayed_in_the_next_block(
    defaults: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restore(number: int, handler: Any) -> Any:
        before = as_ever(number, handler)
        if number == signal.SIGTERM and not isinstance(handler, exits._Delay):
            os.kill(os.getpid(), signal.SIGTERM)
        return before

    hold()
    as_ever = signal.signal
    with pytest.raises(SystemExit), uninterrupted():
        monkeypatch.setattr(exits.signal, "signal", restore)
    monkeypatch.undo()
    reached = False
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        reached = True
    release()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_while_closing_is_the_context_of_the_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as raised, uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("still there")
    assert isinstance(raised.value.__context__, OSError)


def test_a_forked_child_ends_as_it_would_without_its_parents_pool() -> None:
    program = """
        with pool():
            child = os.fork()
            if not child:
                send("SIGTERM")
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(program) == (0, ["-15", "closed"])


def test_a_child_that_is_forked_while_signals_are_delayed_does_not_delay_them() -> None:
    program = """
        def fork():
            child = os.fork()
            if not child:
                send("SIGTERM")
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        with pool():
            with uninterrupted():
                thread = threading.Thread(target=fork)
                thread.start()
                thread.join()
    """
    assert run(program) == (0, ["-15", "closed"])


@pytest.mark.skipif(
    (3, 12, 0) <= sys.version_info[:3] < (3, 12, 3),
    reason="these releases start no thread at exit: https://github.com/python/cpython/issues/113964",
)
def test_at_exit_threads_can_still_be_started_and_executors_still_work() -> None:
    program = """
        from concurrent.futures import ThreadPoolExecutor
        def close():
            with ThreadPoolExecutor() as threads:
                threads.submit(print, "closed").result()
        at_exit(close)
        at_exit(lambda: print("later"))
    """
    assert run(program) == (0, ["later", "closed"])


IN_A_THREAD = """
import time
def close():
    print("closing", flush=True)
    release()

def work():
    hold(close)
    {body}
    time.sleep(60)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT"])
def test_pools_of_another_thread_are_closed_before_a_signal_ends_the_process(name: str) -> None:
    status = -getattr(signal, name)
    assert run(IN_A_THREAD.format(body=f"send('{name}')")) == (status, ["closing"])


def test_sigquit_closes_pools_of_the_main_thread_too() -> None:
    program = """
        import time
        def close():
            print("closing", flush=True)
            release()
        hold(close)
        send("SIGQUIT")
        time.sleep(60)
    """
    assert run(program) == (-signal.SIGQUIT, ["closing"])


@pytest.mark.parametrize(
    ("after", "status"),
    [
        ("release()", -signal.SIGTERM),
        ("release(); hold(close); release()", -signal.SIGTERM),
        ("arm(); release(); disarm(); hold(close); release()", -signal.SIGTERM),
    ],
)
def test_after_the_last_pool_of_another_thread_signals_do_what_they_always_did(after: str, status: int) -> None:
    assert run(IN_A_THREAD.format(body=f"{after}; send('SIGTERM')")) == (status, [])


def test_a_forked_child_does_not_close_the_pools_of_its_parents_thread() -> None:
    body = """
    child = os.fork()
    if not child:
        send("SIGTERM")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    release()
    os._exit(0)
    """
    assert run(IN_A_THREAD.format(body=body.strip())) == (0, ["-15"])


def test_the_applications_handlers_count_in_other_threads_too() -> None:
    program = """
        signal.signal(signal.SIGTERM, lambda *_: print("mine", flush=True))
        thread = threading.Thread(target=hold)
        thread.start()
        thread.join()
        signal.signal(signal.SIGQUIT, lambda *_: print("mine", flush=True))
        send("SIGTERM")
        send("SIGQUIT")
        release()
        send("SIGTERM")
        send("SIGQUIT")
    """
    assert run(program) == (0, ["mine"] * 4)


def test_a_traceback_that_the_application_has_faulthandler_write_stays_and_ends_nothing() -> None:
    program = """
        import faulthandler, tempfile
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.register(signal.SIGQUIT, file=file, all_threads=False)
            for _ in range(2):
                with pool():
                    with pool():
                        send("SIGQUIT")
            send("SIGQUIT")
            file.seek(0)
            print(file.read().count("most recent call first"))
    """
    assert run(program) == (0, ["closed"] * 4 + ["3"])


def test_a_signal_that_comes_while_a_thread_closes_its_pool_ends_the_process() -> None:
    program = """
        import time
        shutting, asked = threading.RLock(), threading.Event()
        def close():
            asked.set()
            with shutting:
                print("closed", flush=True)

        def work():
            hold(close)
            with shutting:
                send("SIGTERM")
                asked.wait()
                release()
            time.sleep(60)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """
    assert run(program) == (-signal.SIGTERM, ["closed"])


def test_a_signal_ends_the_process_although_pools_cannot_be_closed() -> None:
    program = """
        import time
        thread = threading.Thread(target=hold, args=(sys.exit,))
        thread.start()
        thread.join()
        send("SIGTERM")
        time.sleep(60)
    """
    assert run(program) == (-signal.SIGTERM, [])


def test_pools_of_a_process_with_many_open_files_are_closed_too() -> None:
    body = """
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, 2000))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    hold(close)
    send("SIGTERM")
    """
    program = IN_A_THREAD.replace("hold(close)", "import resource").format(body=body.strip())
    assert run(program) == (-signal.SIGTERM, ["closing"])


def test_a_pool_that_could_not_be_held_does_not_count() -> None:
    program = """
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            hold()
        except OSError:
            print("no descriptor")
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with pool():
            pass
        send("SIGTERM")
    """
    assert run(f"import resource\n{textwrap.dedent(program)}") == (-signal.SIGTERM, ["no", "descriptor", "closed"])


OPENED_AT_EXIT = """
import atexit
import skyward as sky
{loaded}

def main():
    try:
        with sky.ComputePool(provider=sky.Local(), display="quiet"):
            pass
    except sky.errors.PoolStateError as error:
        print(error)

atexit.register(main)
"""


@pytest.mark.parametrize("loaded", ["import concurrent.futures.thread, skyward.api.pool", "import threading"])
def test_a_pool_opened_while_the_interpreter_shuts_down_is_refused_with_the_reason(loaded: str) -> None:
    program = OPENED_AT_EXIT.format(loaded=loaded)

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.startswith("a pool cannot be opened while the interpreter shuts down"), done.stderr
