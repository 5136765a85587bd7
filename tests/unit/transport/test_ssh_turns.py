from __future__ import annotations

from skyward.transport._turns import Turns


def test_so_many_have_their_turn_and_the_others_wait_in_order() -> None:
    turns = Turns(2)

    taken = [turns.take() for _ in range(4)]
    assert [turn.done() for turn in taken] == [True, True, False, False]

    turns.give()
    assert [turn.done() for turn in taken] == [True, True, True, False]


def test_who_gives_up_waiting_takes_no_turn() -> None:
    turns = Turns(1)
    first, second, third = (turns.take() for _ in range(3))

    assert second.cancel()
    turns.give()

    assert first.done()
    assert third.done()
    assert not turns.take().done()
