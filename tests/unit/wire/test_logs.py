"""How printed text becomes lines, and whose they are."""

from __future__ import annotations

import contextvars
import io
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyte
import pytest
from rich.console import Console
from rich.progress import Progress

from skyward.node.worker.output import CallOutput, OutputRouter
from skyward.wire.messages import LogPiece
from skyward.wire.printed_lines import PIECE_CHARS, LineAssembler, Reassembler


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def assembler(clock: Clock) -> LineAssembler:
    return LineAssembler("stdout", clock)


def texts(pieces: Iterable[LogPiece]) -> list[str]:
    return [piece.text for piece in pieces]


def feed_all(assembler: LineAssembler, *writes: str | bytes) -> list[str]:
    return texts([piece for data in writes for piece in assembler.feed(data)] + assembler.finish())


class TestLines:
    @pytest.mark.parametrize(
        "writes, lines",
        [
            ([], []),
            (["a\n"], ["a"]),
            (["a", "b", "\n", "c"], ["ab", "c"]),
            (["\n\n"], ["", ""]),
            (["a\r\nb\r\n"], ["a", "b"]),
            (["a\r", "\nb"], ["a", "b"]),
            (["a\r", "", "\nb"], ["a", "b"]),
            (["\r\n", "\r", "\n"], ["", ""]),
            (["no end"], ["no end"]),
            (["tab\tand \x0b\x0c\x1c\u2028 stay\n"], ["tab\tand \x0b\x0c\x1c\u2028 stay"]),
            (["grüße\n", "日本"], ["grüße", "日本"]),
        ],
        ids=repr,
    )
    def test_are_put_together(self, assembler: LineAssembler, writes: list[str], lines: list[str]) -> None:
        assert feed_all(assembler, *writes) == lines

    def test_do_not_depend_on_how_the_text_was_cut(self, clock: Clock) -> None:
        rng = random.Random(4)
        for _ in range(200):
            text = "".join(rng.choice(["a", "b", "\n", "\r\n", "é"]) for _ in range(30))
            cuts = sorted(rng.randrange(len(text) + 1) for _ in range(6))
            writes = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

            lines = feed_all(LineAssembler("stdout", clock), *writes)

            assert "\n".join(lines) == text.replace("\r\n", "\n").removesuffix("\n")

    def test_come_as_soon_as_they_end_with_stream_and_time(self, clock: Clock) -> None:
        assembler = LineAssembler("stderr", clock)

        assert assembler.feed("fir") == []
        clock.now += 5
        assert assembler.feed("st\nse") == [LogPiece(text="first", stream="stderr", timestamp=1005.0)]

    def test_finish_leaves_nothing(self, assembler: LineAssembler) -> None:
        assert feed_all(assembler, "a\r", "b\r") == ["a", "b"]
        assert assembler.finish() == []

    def test_lone_surrogates_can_be_sent(self, assembler: LineAssembler) -> None:
        assert feed_all(assembler, "x\udce9y\n") == [r"x\udce9y"]

    def test_bytes_are_utf8_wherever_they_are_cut(self, assembler: LineAssembler) -> None:
        data = "grüße 日本\n".encode()

        assert feed_all(assembler, *(bytes([byte]) for byte in data)) == ["grüße 日本"]

    def test_undecodable_bytes_are_escaped(self, assembler: LineAssembler) -> None:
        assert feed_all(assembler, b"a\xff\n", b"\xc3") == [r"a\xff", r"\xc3"]


class TestProgress:
    def test_gives_a_line_per_second_and_the_last_state(self, assembler: LineAssembler, clock: Clock) -> None:
        pieces: list[LogPiece] = []
        for step in range(101):
            pieces += assembler.feed(f"\r{step}%")
            clock.now += 0.03
        pieces += assembler.feed("\n")

        assert texts(pieces) == ["0%", "34%", "68%", "100%"]

    def test_is_ended_by_the_call(self, assembler: LineAssembler) -> None:
        assert feed_all(assembler, *(f"\r{step}%" for step in range(50))) == ["0%", "49%"]

    def test_with_the_carriage_return_last_is_the_same(self, assembler: LineAssembler) -> None:
        assert feed_all(assembler, "1%\r", "2%\r", "3%\r", "\r\n", "done\n") == ["1%", "3%", "done"]

    def test_that_was_shown_is_not_shown_twice(self, assembler: LineAssembler) -> None:
        assert feed_all(assembler, "1%\r\r\n", "next\n") == ["1%", "next"]

    def test_wiped_with_spaces_gives_no_empty_line(self, assembler: LineAssembler) -> None:
        assert feed_all(assembler, "\r1%", "\r   \r", "done\n") == ["1%", "done"]

    def test_line_ends_are_not_slowed(self, assembler: LineAssembler) -> None:
        assert feed_all(assembler, "\ra\n", "\rb\n", "\rc\n") == ["a", "b", "c"]

    def test_goes_on_when_the_clock_is_set_back(self, assembler: LineAssembler, clock: Clock) -> None:
        assembler.feed("\r1%\r2%")
        clock.now -= 3600

        assert texts(assembler.feed("\r3%")) == ["2%"]


class TestControlSequences:
    @pytest.mark.parametrize(
        ("writes", "lines"),
        [
            (["\x1b[31mred\x1b[0m and \x1b[38;5;12mblue\x1b[m\n"], ["\x1b[31mred\x1b[0m and \x1b[38;5;12mblue\x1b[m"]),
            (["\x1b[?25lhidden\x1b[1;5r\x1b[>4;2m cursor\x1b[?25h\n"], ["hidden cursor"]),
            (["\x1b]0;a title\x07text\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n"], ["textlink"]),
            (["\x1bPdevice\x1b\\\x1b(B\x1b=\x1b7text\x1b8\n"], ["text"]),
            (["\x1b]no end\nnext\n"], ["", "next"]),
            (["\x9b31mred\x9b0m\n"], ["\x1b[31mred\x1b[0m"]),
            (["end\x1b[3"], ["end"]),
            (["one\x1b[Btwo\n"], ["onetwo"]),
            (["bell \a stays\n"], ["bell \a stays"]),
            ([b"\x1b[1m\xc3", b"\xbc\x1b[0m\n"], ["\x1b[1mü\x1b[0m"]),
        ],
        ids=repr,
    )
    def test_but_colours_are_dropped(self, assembler: LineAssembler, writes: list[Any], lines: list[str]) -> None:
        assert feed_all(assembler, *writes) == lines

    @pytest.mark.parametrize("digits", [10, 4300, 4301, 100_000])
    @pytest.mark.parametrize("final", ["C", "D", "G", "K", "H", "m", "J", "P", "@", "A"])
    def test_numbers_of_any_length_in_control_sequences_are_read(self, digits: int, final: str) -> None:
        pieces = LineAssembler("stdout", lambda: 0.0).feed(f"abc\rd\x1b[{'9' * digits}{final}\n")
        assert pieces[-1].text.startswith(("d", "\x1b[9"))

    def test_many_movements_forward_make_no_row_of_any_width(self) -> None:
        pieces = LineAssembler("stdout", lambda: 0.0).feed("a\r" + "\x1b[999C" * 1000 + "x\n")
        assert len("".join(piece.text for piece in pieces)) < 10_000

    @pytest.mark.parametrize("at", range(1, 40))
    def test_may_be_cut_anywhere(self, assembler: LineAssembler, at: int) -> None:
        text = "\x1b[32mgreen\x1b[0m\x1b]0;title\x1b\\\x1b(B text\x1b[K\x1b[7X\r\n"

        assert feed_all(assembler, text[:at], text[at:]) == ["\x1b[32mgreen\x1b[0m text"]

    def test_that_never_end_are_not_kept_for_ever(self, assembler: LineAssembler) -> None:
        text = "\x1b]" + "x" * 10_000

        assert feed_all(assembler, text, "y\n") == ["x" * 10_000 + "y"]


class TestBackspace:
    @pytest.mark.parametrize(
        ("writes", "lines"),
        [
            (["\b\babc\n"], ["abc"]),
            (["1%\b\b2%\b\b3%\b\b4%\n"], ["4%"]),
            (["Epoch 1: 10%", "\b\b\b", "20%", "\b\b\b", "30%\n"], ["Epoch 1: 10%", "Epoch 1: 30%"]),
            (["1/9", "\b\b\b\r", "2/9", "\b\b\b\r", "3/9\n"], ["1/9", "3/9"]),
            (["ab\x1b[1mc\x1b[0m\b\bX\n"], ["aX\x1b[1mc\x1b[0m"]),
            (["ab\x1b[1mc\x1b[0m", "\b\bX\n"], ["ab\x1b[1mc\x1b[0m", "aX\x1b[1mc\x1b[0m"]),
            (["abc\x1b[2DX\n"], ["aXc"]),
            (["abc\b\b\bxyz \x1b[A", "\n"], ["xyz"]),
            (["abc", "\b\b", "\n"], ["abc"]),
        ],
        ids=repr,
    )
    def test_edits_the_line(self, assembler: LineAssembler, writes: list[str], lines: list[str]) -> None:
        assert feed_all(assembler, *writes) == lines

    def test_gives_at_most_one_line_a_second(self, assembler: LineAssembler, clock: Clock) -> None:
        pieces = assembler.feed("working ")
        for turn in range(300):
            pieces += assembler.feed(f"{'|/-'[turn % 3]}\b")
            clock.now += 0.01
        pieces += assembler.feed("done\n")

        assert texts(pieces)[-1] == "working done"
        assert len(pieces) <= 5


class TestBlocks:
    def test_of_two_bars_do_not_flood(self, assembler: LineAssembler, clock: Clock) -> None:
        pieces = assembler.feed("\router 0")
        for step in range(100):
            pieces += assembler.feed(f"\n\rinner {step}\x1b[A\router {step // 10}")
            clock.now += 0.03
        pieces += assembler.feed("\n\n") + assembler.finish()

        lines = texts(pieces)
        assert lines[:2] == ["outer 0", "inner 0"]
        assert lines[-2:] == ["outer 9", "inner 99"]
        assert len(lines) <= 12

    def test_that_are_drawn_again_are_shown_whole_once_a_second(self, assembler: LineAssembler, clock: Clock) -> None:
        def drawing(step: int) -> str:
            return "\n".join(f"bar {name} {step}" for name in "abc")

        pieces = assembler.feed(drawing(0))
        for step in range(1, 80):
            clock.now += 0.03
            pieces += assembler.feed("\r\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2K" + drawing(step))
        pieces += assembler.feed("\nafter\n")

        lines = texts(pieces)
        assert lines[:3] == ["bar a 0", "bar b 0", "bar c 0"]
        assert lines[-4:] == ["bar a 79", "bar b 79", "bar c 79", "after"]
        middle = lines[3:-4]
        assert len(middle) == 6
        assert [len({line.split()[2] for line in middle[at : at + 3]}) for at in (0, 3)] == [1, 1]

    def test_end_with_their_call(self, assembler: LineAssembler) -> None:
        pieces = assembler.feed("a 0\nb 0\x1b[A\ra 1\nb 1\x1b[A\ra 2\nb 2")

        assert texts(pieces + assembler.finish())[-2:] == ["a 2", "b 2"]
        assert feed_all(assembler, "next\n") == ["next"]


class TestTerminal:
    """Lines are what a terminal shows of them, whichever sequences draw them."""

    @pytest.mark.parametrize(
        ("writes", "lines"),
        [
            (["12345\rab\n"], ["ab345"]),
            (["a\x1b[1Gb\n"], ["b"]),
            (["50%\x1b[2K\r51%\n"], ["51%"]),
            (["50% of it", "\r\x1b[K51%", "\n"], ["50% of it", "51%"]),
            (["downloading 7%", "\x1b[2K\r", "done\n"], ["downloading 7%", "done"]),
            (["abc\x1b[2Dx\x1b[5Gy\n"], ["axc y"]),
            (["abcdef\x1b[4D\x1b[2P\n"], ["abef"]),
            (["abcdef\x1b[4D\x1b[2X\n"], ["ab  ef"]),
            (["abcd\x1b[2D\x1b[2@--\n"], ["ab--cd"]),
            (["abcd\x1b[3G\x1b[1K\n"], ["   d"]),
            (["one\x1b7 two\x1b8 2\n"], ["one 2wo"]),
            (["\x1b[sa\nb\x1b[uA\n"], ["a", "A", "b"]),
            (["日本\rA\n"], ["A 本"]),
            (["日本\b\b\bX\n"], [" X本"]),
            (["e\u0301e\b\bx\n"], ["xe"]),
            (["日本", "\b\b語\n"], ["日本", "日語"]),
            (["a\tb\rxy\n"], ["xy      b"]),
            (["\x1b]8;;http://x\x07link\x1b]8;;\x07 text\rL\n"], ["Link text"]),
            (["\x1b]8;;http://", "x\x1b", "\\link\x1b]8;;\x1b\\\x1b", "[2", "D..\n"], ["link", "li.."]),
            (["\x1b[01;31m\x1b[Kmatch\x1b[m\x1b[K in\n"], ["\x1b[01;31mmatch\x1b[m in"]),
            (["1\r2\r\n3\r\r\n4\n"], ["2", "3", "4"]),
            (["a\nb\nc\x1b[2A\rA\x1b[1B\rB\n\n"], ["a", "b", "A", "B", "c"]),
            (["a\nb\x1bMA\n", "\n"], ["a", "aA", "b"]),
            (["a\nb\n\x1b[2A\x1b[J", "c\n"], ["a", "b", "c"]),
            (["abc\x1b[Ad\n"], ["abcd"]),
            (["\x1b[Hhome\n"], ["home"]),
            (["\x1b[999999999C\b\b\b\rx\n"], ["x"]),
        ],
        ids=repr,
    )
    def test_draws_lines(self, assembler: LineAssembler, writes: list[str], lines: list[str]) -> None:
        assert feed_all(assembler, *writes) == lines

    @pytest.mark.parametrize("seed", range(40))
    def test_shows_the_rows_of_an_emulator(self, assembler: LineAssembler, seed: int) -> None:
        rng = random.Random(seed)
        parts = [
            "ab",
            "c",
            "  ",
            "\n",
            "\r",
            "\b",
            "\b\b",
            "\x1b[A",
            "\x1b[2A",
            "\x1b[K",
            "\x1b[1K",
            "\x1b[2K",
            "\x1b[3G",
        ]
        parts += [
            "\x1b[2D",
            "\x1b[4C",
            "\x1b[31m",
            "\x1b[0m",
            "\x1b[2P",
            "\x1b[3X",
            "\x1b[2@",
            "\x1b]0;t\x07",
            "\x1b[?25l",
        ]
        text = "".join(rng.choice(parts) for _ in range(60))
        screen = pyte.Screen(300, 80)
        screen.set_mode(pyte.modes.LNM)
        pyte.Stream(screen).feed(text)

        sent = iter([re.sub(r"\x1b\[\d*m", "", line).rstrip() for line in feed_all(assembler, text)])

        assert [row for row in map(str.rstrip, screen.display) if row and row not in sent] == []

    def test_nested_bars_of_tqdm_end_as_they_were_last(self, assembler: LineAssembler, clock: Clock) -> None:
        pieces: list[LogPiece] = []
        for step in range(50):
            for write in (f"\router {step}", "\n", f"\rinner {step * 2}", "\x1b[A"):
                pieces += assembler.feed(write)
            clock.now += 0.05
        pieces += assembler.feed("\n") + assembler.feed("\n")

        lines = texts(pieces)
        assert lines[-2:] == ["outer 49", "inner 98"]
        assert 4 <= len(lines) <= 12

    def test_frames_of_rich_are_shown_once_a_second_and_at_their_end(
        self, assembler: LineAssembler, clock: Clock
    ) -> None:
        file = Written()
        console = Console(file=file, force_terminal=True, width=60, color_system=None, legacy_windows=False)
        progress = Progress("{task.description}", "{task.completed}", console=console, auto_refresh=False)
        pieces: list[LogPiece] = []
        with progress:
            tasks = [progress.add_task(name, total=30) for name in ("left", "right")]
            for _ in range(30):
                for task in tasks:
                    progress.advance(task)
                progress.refresh()
                clock.now += 0.1
        for write in file.writes:
            pieces += assembler.feed(write)
            clock.now += 0.05

        lines = [line.split() for line in texts(pieces + assembler.finish())]
        assert lines[-2:] == [["left", "30"], ["right", "30"]]
        assert len(lines) <= 16

    @pytest.mark.parametrize(
        "storm",
        ["\r", "x\r", "\b", "\x1b[A", "\x1b[31m", "\x1b", "\x9b", "\x90", "\x1b]", "\0", "\x1b[1000@x", "\x1b7\x1b8"],
    )
    def test_of_control_characters_only_takes_linear_time_and_bounded_memory(
        self, assembler: LineAssembler, storm: str
    ) -> None:
        text = storm * (200_000 // len(storm))
        began = time.process_time()
        for end in ("", "\n"):
            assembler.feed(text + end)
        assembler.finish()

        assert time.process_time() - began < 10

    def test_long_text_in_an_edited_line_is_one_line(self, assembler: LineAssembler) -> None:
        text = "0123456789" * (1 << 16)
        pieces = assembler.feed("bar") + assembler.feed(f"\r{text}") + assembler.feed("end\n")

        receiver = Reassembler()
        assert texts(whole for piece in pieces if (whole := receiver.add(piece))) == ["bar", text + "end"]


class Written(io.StringIO):
    """Keeps each write by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str, /) -> int:
        self.writes.append(text)
        return len(text)


class TestLongLines:
    def test_come_in_pieces_and_are_put_together_again(self, assembler: LineAssembler) -> None:
        line = "0123456789" * (1 << 20)
        pieces = assembler.feed(f"before\n{line}\nafter\n")
        receiver = Reassembler()

        assert all(len(piece.text) <= PIECE_CHARS for piece in pieces)
        assert [piece.partial for piece in pieces[1:-1]] == [True] * 39 + [False]
        assert texts(whole for piece in pieces if (whole := receiver.add(piece))) == ["before", line, "after"]

    @pytest.mark.parametrize("end", ["", "\n", "\r\n", "\r"])
    @pytest.mark.parametrize("length", [PIECE_CHARS - 1, PIECE_CHARS, PIECE_CHARS + 1, 2 * PIECE_CHARS])
    def test_end_with_a_piece_that_is_not_partial(self, assembler: LineAssembler, length: int, end: str) -> None:
        pieces = assembler.feed("x" * length + end) + assembler.finish()

        assert [piece.partial for piece in pieces] == [True] * ((length - 1) // PIECE_CHARS) + [False]
        assert "".join(texts(pieces)) == "x" * length

    def test_written_bit_by_bit_are_not_kept_back(self, assembler: LineAssembler) -> None:
        pieces = [piece for _ in range(PIECE_CHARS + 1) for piece in assembler.feed(".")]

        assert [piece.partial for piece in pieces] == [True]

    def test_of_two_streams_do_not_mix(self) -> None:
        receiver = Reassembler()
        receiver.add(LogPiece(text="out", partial=True, stream="stdout", timestamp=1.0))

        error = receiver.add(LogPiece(text="err", stream="stderr", timestamp=2.0))
        whole = receiver.add(LogPiece(text="put", stream="stdout", timestamp=3.0))

        assert error == LogPiece(text="err", stream="stderr", timestamp=2.0)
        assert whole == LogPiece(text="output", stream="stdout", timestamp=3.0)


class Deliveries:
    """What a worker would send: (call, stream, text), in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, call_id: int, pieces: Sequence[LogPiece], _log_end: int = 0, /) -> None:
        self.seen += [(call_id, piece.stream, piece.text) for piece in pieces]

    def texts(self, call_id: int) -> list[str]:
        return [text for call, _, text in self.seen if call == call_id]


class Worker:
    """A worker's standard streams, with what would have gone to its log."""

    def __init__(self) -> None:
        self.sent = Deliveries()
        self.log = io.StringIO()
        self.output = CallOutput(self.sent)
        self.stdout = OutputRouter(self.log, stream="stdout", current=self.output.current)
        self.stderr = OutputRouter(self.log, stream="stderr", current=self.output.current)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def run_in_thread(target: Callable[[], object]) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


class TestRouting:
    def test_a_calls_text_is_its_own_and_all_else_goes_to_the_log(self, worker: Worker) -> None:
        print("before", file=worker.stdout)
        with worker.output.of_call(7):
            print("out", 1, file=worker.stdout)
            print("error", file=worker.stderr)
        print("after", file=worker.stdout)

        assert worker.sent.seen == [(7, "stdout", "out 1"), (7, "stderr", "error")]
        assert worker.log.getvalue() == "before\nafter\n"

    def test_text_of_a_thread_that_outlives_its_call_is_of_no_call(self, worker: Worker) -> None:
        call_ended = threading.Event()

        def speak() -> None:
            call_ended.wait()
            print("late", file=worker.stderr)
            print("unfinished", end="", file=worker.stdout)

        thread = threading.Thread(target=speak)
        with worker.output.of_call(7):
            thread.start()
        call_ended.set()
        thread.join()
        before_the_end = [*worker.sent.seen]
        worker.output.end()

        assert before_the_end == [(0, "stderr", "late")]
        assert worker.sent.seen[1:] == [(0, "stdout", "unfinished")]
        assert worker.log.getvalue() == ""

    def test_before_the_first_call_and_after_the_end_threads_print_to_the_log(self, worker: Worker) -> None:
        run_in_thread(lambda: print("early", file=worker.stdout))
        with worker.output.of_call(7):
            pass
        worker.output.end()
        run_in_thread(lambda: print("late", file=worker.stdout))

        assert (worker.sent.seen, worker.log.getvalue()) == ([], "early\nlate\n")

    def test_what_has_no_line_end_comes_with_the_end_of_the_call_even_if_it_fails(self, worker: Worker) -> None:
        def fail() -> None:
            with worker.output.of_call(1):
                print("last words", end="", file=worker.stdout)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()

        assert worker.sent.seen == [(1, "stdout", "last words")]

    def test_threads_of_a_call_print_to_it(self, worker: Worker) -> None:
        with worker.output.of_call(3):
            run_in_thread(lambda: print("from a thread", file=worker.stdout))

        assert worker.sent.seen == [(3, "stdout", "from a thread")]

    def test_two_calls_at_once_are_kept_apart(self, worker: Worker) -> None:
        both = threading.Barrier(2)

        def call(call_id: int) -> None:
            with worker.output.of_call(call_id):
                for number in range(200):
                    both.wait()
                    print(call_id, end=" ", file=worker.stdout)
                    print(number, file=worker.stdout)

        threads = [threading.Thread(target=call, args=(call_id,)) for call_id in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        for call_id in (1, 2):
            assert worker.sent.texts(call_id) == [f"{call_id} {number}" for number in range(200)]

    def test_no_text_of_concurrent_threads_is_lost(self, worker: Worker) -> None:
        def chatter(name: int) -> None:
            for number in range(500):
                worker.stdout.write(f"{name}:{number}\n")

        with worker.output.of_call(1):
            threads = [threading.Thread(target=chatter, args=(name,)) for name in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        for name in range(4):
            own = [text for text in worker.sent.texts(1) if text.startswith(f"{name}:")]
            assert own == [f"{name}:{number}" for number in range(500)]

    def test_who_outlives_its_call_prints_to_the_log(self, worker: Worker) -> None:
        with worker.output.of_call(1):
            context = contextvars.copy_context()

        context.run(worker.stdout.write, "late\n")

        assert worker.sent.seen == []
        assert worker.log.getvalue() == "late\n"

    def test_a_write_that_finds_its_call_just_ended_is_not_lost(self, worker: Worker) -> None:
        with worker.output.of_call(1):
            sink = worker.output.current()
        assert sink is not None

        sink.write("stdout", "almost late")

        assert worker.sent.seen == [(1, "stdout", "almost late")]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    def test_a_forked_process_writes_to_the_log(self) -> None:
        program = """if True:
            import os, sys
            from skyward.node.worker.output import CallOutput
            log, sent = sys.stdout, []
            output = CallOutput(lambda call_id, pieces, log_end: sent.extend(piece.text for piece in pieces))
            output.install()
            with output.of_call(1):
                child = os.fork()
                if child:
                    os.waitpid(child, 0)
                print("parent" if child else "child")
            print("sent", sent, file=log)
        """
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

        assert done.stdout.splitlines() == ["child", "sent []", "sent ['parent']"]

    def test_a_finalizer_may_print_inside_a_print(self) -> None:
        seen: list[str] = []

        def deliver(_call_id: int, pieces: Sequence[LogPiece], _log_end: int = 0, /) -> None:
            seen.extend(texts(pieces))
            if len(seen) == 1:
                router.write("from a finalizer\n")

        output = CallOutput(deliver)
        router = OutputRouter(io.StringIO(), stream="stdout", current=output.current)
        with output.of_call(1):
            router.write("first\n")

        assert seen == ["first", "from a finalizer"]


class TestAsATextStream:
    def test_stands_in_for_the_interpreters_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sent = Deliveries()
        output = CallOutput(sent)
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        monkeypatch.setattr(sys, "stderr", io.StringIO())

        output.install()
        with output.of_call(5):
            print("out")
            print("error", file=sys.stderr)

        assert sent.seen == [(5, "stdout", "out"), (5, "stderr", "error")]

    def test_has_what_libraries_ask_for(self, worker: Worker) -> None:
        stream: Any = worker.stdout

        assert (stream.encoding, stream.isatty(), stream.closed, stream.writable(), stream.readable()) == (
            "utf-8",
            False,
            False,
            True,
            False,
        )
        assert stream.errors == "backslashreplace"
        assert (stream.name, stream.mode) == ("<stdout>", "w")
        assert stream.write("four") == 4
        stream.writelines(["a\n", "b\n"])
        stream.flush()
        stream.reconfigure(encoding="latin-1", line_buffering=True)
        assert worker.log.getvalue() == "foura\nb\n"

    def test_refuses_what_is_no_text(self, worker: Worker) -> None:
        with pytest.raises(TypeError, match="bytes"):
            worker.stdout.write(b"bytes")  # type: ignore[arg-type]

    def test_stays_open(self, worker: Worker) -> None:
        with worker.stdout:
            pass
        worker.stdout.buffer.close()
        io.TextIOWrapper(worker.stdout.buffer, encoding="utf-8").close()

        with worker.output.of_call(1):
            print("still here", file=worker.stdout)
        assert worker.sent.texts(1) == ["still here"]

    def test_fileno_is_the_originals(self, tmp_path: Any) -> None:
        with (tmp_path / "log").open("w") as log:
            router = OutputRouter(log, stream="stdout", current=lambda: None)

            assert router.fileno() == router.buffer.fileno() == log.fileno()

    def test_takes_bytes_through_its_buffer(self, worker: Worker) -> None:
        with worker.output.of_call(1):
            for data in (b"gr\xc3", bytearray(b"\xbc"), memoryview(b"n\n")):
                assert worker.stdout.buffer.write(data) == len(data)
        worker.stdout.buffer.write(b"no call \xff\n")

        assert worker.sent.texts(1) == ["grün"]
        assert worker.log.getvalue() == "no call \\xff\n"

    def test_can_be_wrapped_anew(self, worker: Worker) -> None:
        with worker.output.of_call(1):
            wrapped = io.TextIOWrapper(worker.stdout.buffer, encoding="utf-8", line_buffering=True)
            print("wräpped", file=wrapped)

        assert worker.sent.texts(1) == ["wräpped"]

    def test_text_that_the_log_cannot_encode_does_not_raise(self, tmp_path: Any) -> None:
        path = tmp_path / "log"
        with path.open("w", encoding="ascii") as log:
            OutputRouter(log, stream="stdout", current=lambda: None).write("ü \udcff\n")

        assert path.read_text() == "\\xfc \\udcff\n"

    def test_logging_arrives(self, worker: Worker) -> None:
        with worker.output.of_call(1):
            handler = logging.StreamHandler(worker.stderr)
            handler.emit(logging.LogRecord("app", logging.INFO, "f", 1, "hello %s", ("you",), None))

        assert worker.sent.seen == [(1, "stderr", "hello you")]

    def test_ten_thousand_prints_arrive_in_order_and_cheaply(self, worker: Worker) -> None:
        started = time.thread_time()
        with worker.output.of_call(1):
            for number in range(10_000):
                print(number, file=worker.stdout)

        assert worker.sent.texts(1) == [str(number) for number in range(10_000)]
        assert time.thread_time() - started < 1.0
