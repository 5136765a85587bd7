from __future__ import annotations

import pytest
from benchmarks.measured import Measured
from benchmarks.report import Circumstances, duration, page
from benchmarks.results import Result, figures, times_as_fast, verdicts
from benchmarks.rows import ROWS, Goal, Limit, Row


def result(peer: str, *seconds: float, number: int = 0, error: str = "", **figures: float) -> Result:
    measured = None if error else Measured(seconds=seconds, figures=figures)
    return Result(row="row", peer=peer, round=number, measured=measured, error=error)


def row(*goals: Goal | Limit) -> Row:
    return Row(title="work", measure=lambda _: Measured(), peers=("skyward", "loky"), goals=goals)


def test_a_ratio_is_taken_within_a_round_before_rounds_are_compared() -> None:
    # The machine was ten times as slow in the second round, for both.
    quiet = [result("skyward", 1.0), result("loky", 2.0)]
    noisy = [result("skyward", 10.0, number=1), result("loky", 20.0, number=1)]

    assert times_as_fast([*quiet, *noisy], "row", "loky") == 2


def test_a_round_in_which_either_has_no_time_does_not_count() -> None:
    results = [result("skyward", 1.0), result("loky", 3.0), result("skyward", 9.0, number=1)]

    assert times_as_fast(results, "row", "loky") == 3
    assert times_as_fast([result("skyward", 1.0)], "row", "loky") is None


def test_a_figure_is_the_median_of_its_rounds() -> None:
    results = [result("skyward", number=number, stall=stall) for number, stall in enumerate([0.1, 9.0, 0.2])]

    assert figures(results, "row", "skyward") == {"stall": 0.2}


@pytest.mark.parametrize(
    ("theirs", "outcome", "met"),
    [(4.0, "met", True), (3.0, "met", True), (2.0, "missed by 50%", False), (1.0, "missed 3.0-fold", False)],
)
def test_a_goal_says_by_how_much_it_is_missed(theirs: float, outcome: str, *, met: bool) -> None:
    (verdict,) = verdicts([result("skyward", 1.0), result("loky", theirs)], "row", row(Goal(peer="loky", at_least=3)))

    assert (verdict.outcome, verdict.met) == (outcome, met)


@pytest.mark.parametrize(
    ("stall", "outcome"), [(0.0, "met"), (0.1, "met"), (0.12, "missed by 20%"), (0.5, "missed 5.0-fold")]
)
def test_a_limit_says_by_how_much_it_is_exceeded(stall: float, outcome: str) -> None:
    (verdict,) = verdicts([result("skyward", stall=stall)], "row", row(Limit(figure="stall", at_most=0.1, text="s")))

    assert verdict.outcome == outcome


@pytest.mark.parametrize("absent", ["skyward", "loky"])
def test_a_goal_that_could_not_be_measured_is_not_met_and_says_why(absent: str) -> None:
    (present,) = {"skyward", "loky"} - {absent}
    results = [result(present, 1.0), result(absent, error="absent: No module named 'it'")]

    (verdict,) = verdicts(results, "row", row(Goal(peer="loky", at_least=1)))

    assert (verdict.met, verdict.value, verdict.outcome) == (False, None, "absent: No module named 'it'")


def test_the_page_names_every_peer_and_says_which_is_absent() -> None:
    where = Circumstances(machine={"cores": "2"}, versions={"joblib": "1.6"})
    results = [result("skyward", 0.002), result("loky", error="absent: No module named 'loky'")]

    notes = "# row\n\nTried in vain.\n"

    text = page(results, {"row": row(Goal(peer="loky", at_least=2))}, where, notes)

    assert "| work | skyward | loky |" in text
    assert "| work | **2 ms** (2 ms to 2 ms) | absent: No module named 'loky' |" in text
    assert "| work | times as fast as loky |  | ≥ 2 | absent: No module named 'loky' |" in text
    assert "| cores | 2 |" in text
    assert "- *work*: times as fast as loky: none (≥ 2, absent: No module named 'loky'). Tried in vain." in text


def test_a_goal_by_processor_time_adds_the_client_and_the_node() -> None:
    results = [
        result("skyward", 9.0, client_cpu_us=1, node_cpu_us=1),
        result("loky", 1.0, client_cpu_us=2, node_cpu_us=4),
    ]

    assert times_as_fast(results, "row", "loky", by="processor time") == 3


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.345, "12.3 s"), (0.0123, "12.3 ms"), (0.000_000_5, "0.5 µs"), (123.4, "123 s")]
)
def test_a_duration_has_three_digits_and_a_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_every_goal_is_about_a_peer_that_its_row_measures() -> None:
    for each in ROWS.values():
        assert each.peers[0] == "skyward"
        assert {goal.peer for goal in each.goals if isinstance(goal, Goal)} <= set(each.peers)
