"""Output that passes Python by: captured, told from the worker's own, in order, and never in anybody's way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from skyward.node.worker.call_mark import Mark, blank_mark, make_mark, open_mark
from skyward.node.worker.descriptor_capture import LAST_WORDS_BYTES, WorkerLog, take_last_words
from skyward.node.worker.output import CallOutput, OutputRouter
from skyward.wire.messages import LogPiece
from skyward.wire.printed_lines import Reassembler


class Worker:
    """A worker's log and calls. ``write`` is what a subprocess does."""

    def __init__(self, folder: Path) -> None:
        self.path, self.mark = folder / "worker-0.log", blank_mark()
        self.path.write_text("of the process before\n")
        self.log = WorkerLog(self.path, self.mark)
        self.sent: list[tuple[int, str]] = []
        self.lines = Reassembler()
        self.log_end = 0
        self.output = CallOutput(self.deliver, log=self.log)
        self.stdout = OutputRouter(sys.stdout, stream="stdout", current=self.output.current, own=self.log.own)
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def deliver(self, call_id: int, pieces: Sequence[LogPiece], log_end: int = 0, /) -> None:
        whole = [line for piece in pieces if (line := self.lines.add(piece))]
        self.sent += [(call_id, line.text) for line in whole]
        self.log_end = max(self.log_end, log_end)

    def write(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def print(self, text: str) -> None:
        print(text, file=self.stdout)

    def close(self) -> None:
        self.log.close()
        os.close(self.descriptor)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(tmp_path)
    yield worker
    worker.close()


class TestOrder:
    def test_a_subprocess_that_has_ended_comes_before_what_is_printed_after_it(self, worker: Worker) -> None:
        with worker.output.of_call(7):
            worker.print("one")
            worker.write("two\n")
            worker.print("three")
            worker.write("four\nfive")

        assert worker.sent == [(7, line) for line in ("one", "two", "three", "four", "five")]

    def test_output_between_calls_belongs_to_none(self, worker: Worker) -> None:
        with worker.output.of_call(1):
            worker.write("mine\n")
        worker.write("of a daemon\n")
        worker.output.collect()
        with worker.output.of_call(2):
            worker.write("mine, too\n")

        assert worker.sent == [(1, "mine"), (0, "of a daemon"), (2, "mine, too")]

    def test_a_finalizer_may_print_while_output_is_handed_on(self, worker: Worker) -> None:
        deliver = worker.deliver

        def print_once(call_id: int, pieces: Sequence[LogPiece], log_end: int = 0, /) -> None:
            deliver(call_id, pieces, log_end)
            if len(worker.sent) == 1:
                router.write("from a finalizer\n")

        output = CallOutput(print_once, log=worker.log)
        router = OutputRouter(sys.stdout, stream="stdout", current=output.current)
        with output.of_call(1):
            worker.write("captured\n")

        assert worker.sent == [(1, "captured"), (1, "from a finalizer")]

    def test_a_process_that_never_stops_writing_does_not_keep_the_call_from_its_end(self, tmp_path: Path) -> None:
        worker = Worker(tmp_path)
        output = CallOutput(lambda _call, _pieces, _end=0, /: worker.write("more\n" * 100_000), log=worker.log)
        with output.of_call(1):
            worker.write("once\n")
        worker.close()

    def test_output_goes_on_after_the_log_was_truncated(self, worker: Worker) -> None:
        with worker.output.of_call(1):
            os.truncate(worker.path, 0)
            worker.output.collect()
            worker.write("after\n")

        assert worker.sent == [(1, "after")]


class FailingLog(WorkerLog):
    fails = False

    @property
    def size(self) -> int:
        if self.fails:
            raise OSError(5, "Input/output error")
        return super().size


def test_a_log_that_cannot_be_read_fails_no_call(
    worker: Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = FailingLog(tmp_path / "log", blank_mark())
    output = CallOutput(worker.deliver, log=log)
    stdout = OutputRouter(sys.stdout, stream="stdout", current=output.current, own=log.own)
    log.fails = True
    with output.of_call(1):
        print("printed", file=stdout)
    log.close()

    assert worker.sent == [(1, "printed")]
    assert "could not be read" in caplog.text


class TestTheWorkersOwnMessages:
    def test_go_where_they_went_before_the_worker_had_a_log(self, tmp_path: Path) -> None:
        program = """if True:
            import logging, pathlib, sys
            handler = logging.StreamHandler(sys.stderr)
            logging.getLogger("dask").addHandler(handler)
            from skyward.node.worker.call_mark import blank_mark as opened_mark
            from skyward.node.worker.descriptor_capture import WorkerLog
            log = WorkerLog(pathlib.Path(sys.argv[1], "log"), opened_mark())
            log.redirect()
            logging.getLogger("dask").warning("trouble")
            log.own.write("größer\\n")
            assert not log.has_more
        """
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], timeout=60, check=True, capture_output=True
        )

        assert done.stderr.decode() == "trouble\ngrößer\n"

    def test_are_text_printed_outside_of_calls(self, worker: Worker, capfd: pytest.CaptureFixture[str]) -> None:
        worker.print("no call")
        with worker.output.of_call(1):
            worker.write("a line\n")

        assert worker.sent == [(1, "a line")]

    def test_a_log_has_a_line_from_the_start_so_that_calls_without_output_cost_no_check(self, tmp_path: Path) -> None:
        program = """if True:
            import pathlib, sys
            from skyward.node.worker.call_mark import blank_mark as opened_mark
            from skyward.node.worker.descriptor_capture import WorkerLog
            log = WorkerLog(pathlib.Path(sys.argv[1], "log"), opened_mark())
            log.redirect()
            assert log.is_quiet
        """
        run(program, tmp_path)


def opened_mark(folder: Path) -> Mark:
    mark = open_mark(str(folder / "mark"))
    assert mark is not None
    return mark


def run(program: str, folder: Path, expected: int = 0) -> None:
    make_mark(str(folder / "mark"))
    done = subprocess.run([sys.executable, "-c", program, str(folder)], timeout=60, check=False)
    assert done.returncode == expected, (folder / "log").read_text()


REDIRECTED = """if True:
    import ctypes, os, pathlib, sys, threading, warnings
    from skyward.node.worker.call_mark import open_mark
    from skyward.node.worker.descriptor_capture import WorkerLog
    from skyward.node.worker.output import CallOutput
    def opened_mark(): return open_mark(os.path.join(sys.argv[1], "mark"))
    log = WorkerLog(pathlib.Path(sys.argv[1], "log"), opened_mark())
    log.redirect()
    sent = []
    output = CallOutput(lambda call, pieces, end=0, /: sent.extend(piece.text for piece in pieces), log=log)
    output.install()
"""


SILENCERS = {
    "another stream": "sys.stdout = sys.stderr = io.StringIO()",
    "none": "sys.stdout = sys.stderr = sys.stdin = None",
    "no stream": "del sys.stdout, sys.stderr",
    "a closed file": "sys.stdout = sys.stderr = open(os.devnull, 'w'); sys.stdout.close()",
    "closed": "sys.stdout.close(); sys.stderr.close(); sys.stdout.buffer.close()",
    "the interpreter's closed": "sys.__stdout__.close(); sys.__stderr__.close()",
    "patched": "sys.stdout.write = sys.stderr.write = lambda text: 0; sys.stdout.flush = None",
    "redirected for good": "contextlib.redirect_stdout(io.StringIO()).__enter__()",
    "redirected by a thread that stays": "leave_redirecting_thread()",
    "no descriptor": "os.close(1); os.close(2)",
    "the null device": "null = os.open(os.devnull, os.O_WRONLY); os.dup2(null, 1); os.dup2(null, 2); os.close(null)",
    "one of two": "null = os.open(os.devnull, os.O_WRONLY); os.dup2(null, 2); os.close(null)",
    "a pipe": "there = os.pipe(); os.dup2(there[1], 1); os.dup2(there[1], 2)",
    "a file": "file = open('other', 'w'); file.write('x' * 1000); file.flush(); os.dup2(file.fileno(), 1)",
    "logging": "logging.disable(logging.CRITICAL)",
}


@pytest.mark.parametrize("how", SILENCERS)
def test_a_call_that_silences_its_output_does_not_silence_the_next_one(how: str, tmp_path: Path) -> None:
    program = f"""
    import contextlib, io, logging
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded")  # from Python 3.12 on
    def leave_redirecting_thread():
        entered = threading.Event()
        def redirect():
            with contextlib.redirect_stdout(io.StringIO()):
                entered.set()
                threading.Event().wait()
        threading.Thread(target=redirect, daemon=True).start()
        entered.wait()
    os.chdir(sys.argv[1])
    with output.of_call(1):
        print("before", flush=True)
        os.system("echo before")
        {SILENCERS[how]}
    with output.of_call(2):
        sent.clear()
        print("python", flush=True)
        print("python's error", file=sys.stderr, flush=True)
        os.system("echo shell; echo error >&2")
        if not (child := os.fork()):
            print("a fork")
            os._exit(0)
        os.waitpid(child, 0)
    assert sent == ["python", "python's error", "shell", "error", "a fork"], sent
    assert not logging.root.manager.disable
"""
    run(REDIRECTED + program, tmp_path)


class TestDescriptors:
    def test_c_code_may_write_any_amount_while_it_holds_the_gil(self, tmp_path: Path) -> None:
        run(
            REDIRECTED
            + """
    libc = ctypes.PyDLL(None)  # keeps the lock, so no other thread of Python could read a pipe meanwhile
    with output.of_call(1):
        line = b"x" * 99 + bytes([10])
        for _ in range(100):
            libc.write(1, line * 1000, 100_000)
    assert sent == ["x" * 99] * 100_000, len(sent)
""",
            tmp_path,
        )

    def test_everybody_is_heard_in_order(self, tmp_path: Path) -> None:
        run(
            REDIRECTED
            + """
    libc = ctypes.CDLL(None)
    with output.of_call(1):
        print("python")
        libc.puts(b"c")
        os.system("echo shell; echo error >&2")
        sys.__stdout__.write("python's own\\n")
        print("python again", file=sys.stderr)
        child = os.fork()
        if not child:
            print("child", end=" ")
            print("of a fork")
            os._exit(0)
        os.waitpid(child, 0)
        print("python at last", os.isatty(1), sys.stdout.isatty())
    expected = ["python", "c", "shell", "error", "python's own", "python again", "child of a fork",
                "python at last False False"]
    assert sent == (expected if sys.platform == "linux" else [line for line in sent if line in expected]), sent
""",
            tmp_path,
        )

    def test_a_forked_child_logs_although_another_thread_held_the_lock(self, tmp_path: Path) -> None:
        run(
            REDIRECTED
            + """
    held, go = threading.Event(), threading.Event()
    def hold():
        with log.lock:
            held.set()
            go.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    warnings.simplefilter("ignore") # since 3.12 that of a fork beside threads: the parent would wait for the lock
    child = os.fork()
    if not child:
        log.own.write("in the child\\n")
        print("printed")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    thread.join()
""",
            tmp_path,
        )
        assert (tmp_path / "log").read_text().splitlines()[1:] == ["printed"]

    def test_the_trace_of_a_crash_is_there_afterwards(self, tmp_path: Path) -> None:
        program = """
    def crash():
        ctypes.string_at(0)
    log.own.write("starting\\n")
    with output.of_call(1):
        crash()
"""
        run(REDIRECTED + program, tmp_path, expected=-11)
        words = take_last_words(tmp_path / "log", opened_mark(tmp_path)).data.decode()

        assert words.startswith("Fatal Python error: Segmentation fault")
        assert "in crash" in words


class TestLastWords:
    def take(self, worker: Worker) -> str:
        return take_last_words(worker.path, worker.mark).data.decode()

    def test_are_output_that_has_not_arrived_once(self, worker: Worker) -> None:
        with worker.output.of_call(1):
            worker.write("arrived\n")
            worker.output.collect()
            worker.output.mark(lambda: True)
            worker.write("sent, perhaps\n")
            worker.output.collect()
            worker.output.mark(lambda: False)
            worker.write("never read")

        assert self.take(worker) == "sent, perhaps\nnever read"
        assert self.take(worker) == ""

    def test_are_output_on_its_way_to_be_sent_although_all_that_was_sent_has_arrived(self, worker: Worker) -> None:
        words: list[str] = []

        def mark_and_die(*_: object) -> None:
            output.mark(lambda: True)
            words.append(self.take(worker))

        output = CallOutput(mark_and_die, log=worker.log)
        with output.of_call(1):
            worker.write("not sent\n")
            output.collect()
            worker.write("nor this")

        assert words == ["not sent\n", "nor this"]

    def test_are_output_that_was_handed_on_after_the_question_what_has_arrived(self, worker: Worker) -> None:
        def has_arrived() -> bool:
            worker.write("later\n")
            worker.output.collect()
            return True

        with worker.output.of_call(1):
            worker.write("arrived\n")
            worker.output.collect()
            worker.output.mark(has_arrived)

        assert self.take(worker) == "later\n"

    def test_say_where_they_lie(self, worker: Worker) -> None:
        at = worker.path.stat().st_size
        worker.write("unread\n")

        assert take_last_words(worker.path, worker.mark).at == at

    def test_of_a_worker_with_nothing_to_say_are_none(self, worker: Worker) -> None:
        worker.log.own.write("INFO: starting\n")
        with worker.output.of_call(1):
            worker.write("without an end")
        worker.output.mark(lambda: True)
        worker.log.own.write("INFO: stopping\n")

        assert self.take(worker) == ""
        assert worker.log_end == worker.log.position

    def test_are_bounded(self, worker: Worker) -> None:
        worker.write("x" * 3 * LAST_WORDS_BYTES + "end")

        words = take_last_words(worker.path, worker.mark)
        assert len(words.data) == LAST_WORDS_BYTES
        assert words.data.endswith(b"end")
        assert words.omitted == 2 * LAST_WORDS_BYTES + 3

    def test_of_a_worker_that_never_opened_its_log_are_none(self, tmp_path: Path) -> None:
        assert take_last_words(tmp_path / "log", blank_mark()).data == b""
