"""The wording of a display: figures are rounded, names of work are words, money is only where there is any."""

from __future__ import annotations

import pytest

from skyward.display.words import Work, duration, launch_words, money, price, rate, step_name, work_name
from skyward.events import InstanceLaunching, Progress
from skyward.wire.terminal import cleaned

TIMES = "\N{MULTIPLICATION SIGN}"


@pytest.mark.parametrize(
    ("label", "name"),
    [
        *(("call", "calls"), ("8 calls", "calls"), ("<lambda>", "calls"), ("main.<locals>.<lambda>", "calls")),
        *(("partial", "calls"), ("", "calls"), ("_", "calls")),
        *(("_fit_and_score", "fits"), ("_parallel_build_trees", "trees")),
        *(("_score_candidates", "score candidates"), ("_Subscription(event_type=<class 'object'>)", "subscription")),
        *(("_WrappedFit", "wrapped fit"), ("estimate_pi", "estimate_pi"), ("gather", "gather")),
    ],
)
def test_names_of_work_are_words(label: str, name: str) -> None:
    assert work_name(label) == name


@pytest.mark.parametrize(
    ("step", "words"),
    [("apt", "system packages"), ("server", "starting the supervisor"), ("uv", "uv"), ("volumes", "volumes")],
)
def test_steps_of_a_bootstrap_are_words(step: str, words: str) -> None:
    assert step_name(step) == words


def work(event: Progress, name: str = "fits") -> Work:
    return Work(name=name, progress=event, first_s=0.0, first_ended=0)


@pytest.mark.parametrize(
    ("event", "seconds", "words"),
    [
        (Progress("f", 12, 40, running=4), 4.0, "fits 12/40 · 4 running · 3.0/s · 0:09 left"),
        (Progress("f", 4, 12, failed=1, running=2), 2.5, "fits 4/12 · 1 failed · 2 running · 2.0/s · 0:04 left"),
        (Progress("f", 0, 40), 3.0, "fits 0/40"),
        (Progress("f", 2, 40, cancelled=3, running=1), 4.0, "fits 2/40 · 3 cancelled · 1 running · 30/min · 1:10 left"),
        (Progress("f", 12_000, 40_000), 10.0, "fits 12,000/40,000 · 1,200/s · 0:23 left"),
        (Progress("f", 8, None, running=2), 60.0, "fits 8 done · 2 running · 8.0/min"),
        (Progress("f", 0, 1, running=1), 12.3, "fits: running for 12 s"),
        (Progress("f", 0, 1), 12.3, "fits: 12 s"),
        (Progress("f", 1, 2000), 10.0, "fits 1/2,000 · 6.0/min · 5:33:10 left"),
    ],
)
def test_work_that_goes_on(event: Progress, seconds: float, words: str) -> None:
    assert work(event).ongoing(seconds) == words


@pytest.mark.parametrize(
    ("name", "event", "words"),
    [
        ("fits", Progress("f", 48, 48), "fits 48/48 in 12 s · 4.0/s"),
        ("fits", Progress("f", 3, 5, failed=1, cancelled=1), "fits 3/5 in 12 s · 1 failed · 1 dropped"),
        ("fits", Progress("f", 3, 5, cancelled=2), "fits 3/5 in 12 s · 2 cancelled"),
        ("fits", Progress("f", 4, 5, failed=1), "fits 4/5 in 12 s · 1 failed"),
        ("calls", Progress("f", 1, 1), "1 call: done in 12 s"),
        ("estimate_pi", Progress("f", 0, 1, failed=1), "estimate_pi: failed after 12 s"),
        ("estimate_pi", Progress("f", 0, 1, cancelled=1), "estimate_pi: cancelled after 12 s"),
    ],
)
def test_work_that_has_ended(name: str, event: Progress, words: str) -> None:
    assert work(event, name).ended(12.0) == words


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (InstanceLaunching(1, "p5", "aws"), "launching 1 node on aws: p5"),
        (
            InstanceLaunching(4, "c7i.12xlarge", "aws", region="eu-west-1", spot=True, price_per_hour=0.8129),
            "launching 4 nodes on aws: c7i.12xlarge in eu-west-1, spot, $0.813/h each, $3.25/h in all",
        ),
        (
            InstanceLaunching(1, "p5", "aws", region="eu-west-1", spot=False, price_per_hour=98.32),
            "launching 1 node on aws: p5 in eu-west-1, on demand, $98.32/h",
        ),
        (
            InstanceLaunching(1, "p5", "aws", region="eu-west-1", spot=False),
            "launching 1 node on aws: p5 in eu-west-1, on demand, price unknown",
        ),
        (
            InstanceLaunching(2, "this machine", "local", spot=False, price_per_hour=0.0),
            "launching 2 nodes on local: this machine",
        ),
        (
            InstanceLaunching(
                *(2, "p5", "ssh"),
                price_per_hour=0.0,
                workers_per_node=10,
                cpu_per_worker=4,
                memory_gib_per_worker=8.0,
            ),
            f"launching 2 nodes on ssh: p5; on each 4 {TIMES} 10 workers = 40 cores, 8 GiB {TIMES} 10 workers = 80 GiB",
        ),
        (
            InstanceLaunching(
                *(2, "p5", "aws", "here", True, 9.5),
                accelerator="H100",
                accelerators=8,
                accelerators_asked=1,
                at_most=19.0,
            ),
            (
                f"launching 2 nodes on aws: p5 with 8 {TIMES} H100 (1 asked for) in here, spot, $9.50/h each, "
                "$19.00/h in all, at most $19.00 until timeout"
            ),
        ),
        (
            InstanceLaunching(
                1, "g", "aws", price_per_hour=1.0, accelerator="L4", accelerators=1, accelerators_asked=1
            ),
            f"launching 1 node on aws: g with 1 {TIMES} L4, $1.00/h",
        ),
        (
            InstanceLaunching(1, "p5", "local", price_per_hour=0.0, cpu_per_worker=4),
            "launching 1 node on local: p5",
        ),
    ],
)
def test_launches_say_what_is_bought_for_how_much(event: InstanceLaunching, words: str) -> None:
    assert launch_words(event) == words


def test_figures_are_rounded() -> None:
    assert [duration(seconds) for seconds in (0.04, 4.26, 41.5, 125.2, 7930.0)] == [
        *("0.0 s", "4.3 s", "42 s", "2 min 5 s", "2 h 12 min")
    ]
    assert [money(dollars) for dollars in (0.0, 0.00123, 0.42, 1234.567)] == ["$0.00", "$0.0012", "$0.42", "$1,234.57"]
    assert [price(dollars) for dollars in (0.00456, 0.0312, 12.288)] == ["$0.0046/h", "$0.031/h", "$12.29/h"]
    assert [rate(count, 10.0) for count in (0.2, 3, 25, 12_345)] == ["1.2/min", "18/min", "2.5/s", "1,234/s"]


RED, RESET = "\x1b[31m", "\x1b[0m"


def test_control_sequences_are_applied_kept_or_dropped(subtests: pytest.Subtests) -> None:
    for text, plain, coloured in [
        ("plain\ttab", "plain\ttab", "plain\ttab"),
        (f"{RED}red{RESET} not", "red not", f"{RED}red{RESET} not{RESET}"),
        (f"{RED}red", "red", f"{RED}red{RESET}"),
        ("up\x1b[1A\x1b[2Kand \x1b[?25laway", "up and away", "up and away"),
        ("\x1b]8;;https://x.org\x1b\\link\x1b]8;;\x1b\\ \x1b]0;title\x07end", "link end", "link end"),
        (
            "\x9b31mold\x1bMold \x1b(Bset \x1bPq#0\x1b\\done",
            "old old set done",
            f"{RED}old{RESET} {RED}old set done{RESET}",
        ),
        ("cut off \x1b[3", "cut off ", "cut off "),
        ("bell \x07 null \x00", "bell \\x07 null \\x00", "bell \\x07 null \\x00"),
        ("12\b3", "13", "13"),
        ("\b\b1", "1", "1"),
        ("1/10 loss\r2/10", "2/10 loss", "2/10 loss"),
        ("1/10 loss\r\x1b[K2/10", "2/10", "2/10"),
        ("1/10\x1b[2K\r2/10", "2/10", "2/10"),
        (f"xxxx\r{RED}ab{RESET}", "abxx", f"{RED}ab{RESET}xx"),
        ("a\x1b[3Gb\x1b[Dc", "a c", "a c"),
        ("日本\b\b語", "日語", "日語"),
        (f"{RED}\x1b[Kmatch{RESET}\x1b[K rest", "match rest", f"{RED}match{RESET} rest"),
        ("abc\b\b\bxyz \x1b[A", "xyz", "xyz"),
        ("", "", ""),
    ]:
        with subtests.test(text=text, plain=plain, coloured=coloured):
            assert cleaned(text, colours=False) == plain
            assert cleaned(text, colours=True) == coloured
