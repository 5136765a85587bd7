"""What the decorators of all frameworks share, with one that only writes down what is done to it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest

from skyward import distributed
from skyward.api.calls import ComputeFunction, compute
from skyward.distributed._gang import Gang, checked_backend, decorator, imported, is_gang, unused_port
from skyward.distributed.runtime import CallContext, FreshProcessNeeded, enter_call
from skyward.errors import ConfigurationError


class Diary:
    """The only session of a framework."""

    port = 7
    gpus: tuple[str, ...] = ("0",)

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.gangs: list[Gang] = []

    @contextmanager
    def join(self, gang: Gang) -> Generator[None]:
        self.gangs.append(gang)
        self.lines.append("up")
        try:
            yield
        finally:
            self.lines.append("down")


@pytest.fixture
def diary() -> Diary:
    return Diary()


@pytest.fixture
def work(diary: Diary) -> Callable[[int], int]:
    @decorator(lambda: diary)
    def work(number: int) -> int:
        """Divide."""
        diary.lines.append("work")
        return 6 // number

    return work


def of_two(rank: int) -> CallContext:
    def meet(text: str) -> list[str]:
        other = text.replace('"port": 7', '"port": 8')
        return [text, other] if rank == 0 else [other, text]

    return CallContext(world=2, rank=rank, meet=meet)


def test_user_code_runs_while_the_framework_is_up(work: Callable[[int], int], diary: Diary) -> None:
    assert work(2) == 3
    assert diary.lines == ["up", "work", "down"]
    assert diary.gangs[0].world == 1


def test_a_failure_alone_takes_it_down(work: Callable[[int], int], diary: Diary) -> None:
    with pytest.raises(ZeroDivisionError):
        work(0)
    assert diary.lines == ["up", "work", "down"]


def test_a_failure_among_others_leaves_it_up(
    work: Callable[[int], int], diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_RANK", "")  # it stays up: the worker's process ends
    with enter_call(of_two(1)), pytest.raises(ZeroDivisionError):
        work(0)
    assert diary.lines == ["up", "work"]


def test_among_others_success_takes_it_down(work: Callable[[int], int], diary: Diary) -> None:
    with enter_call(of_two(1)):
        assert work(3) == 2
    assert diary.lines == ["up", "work", "down"]


def test_every_rank_knows_what_all_have_said(work: Callable[[int], int], diary: Diary) -> None:
    with enter_call(of_two(1)):
        work(1)
    (gang,) = diary.gangs
    assert (gang.rank, gang.world, gang.local_world) == (1, 2, 2)
    assert (gang.mine.port, gang.first.port) == (7, 8)
    assert gang.mine.gpus == ("0",)
    assert gang.mine.address == "127.0.0.1"


def test_one_inside_another_that_wants_a_fresh_process_is_an_error_not_a_second_run(diary: Diary) -> None:
    @decorator(lambda: diary)
    def outer() -> None:
        raise FreshProcessNeeded("it is in use")

    with pytest.raises(ConfigurationError, match="inside another one: it is in use"):
        outer()


def test_name_and_documentation_stay(work: Callable[[int], int]) -> None:
    assert (work.__name__, work.__doc__) == ("work", "Divide.")
    assert is_gang(work)


def test_either_order_with_compute_gives_a_compute_function(diary: Diary) -> None:
    def work() -> int:
        return 1

    outside = compute(retries=7)(decorator(lambda: diary)(work))
    inside: Any = decorator(lambda: diary)(compute(retries=7)(work))

    for decorated in (outside, inside):
        assert isinstance(decorated, ComputeFunction)
        assert decorated.retries == 7
        assert decorated().invocation().gang
        assert pickle.loads(pickle.dumps(decorated())).invocation().gang
        assert decorated.local() == 1


def test_plain_calls_are_no_gang() -> None:
    assert not compute(len)([1]).invocation().gang
    assert not is_gang(len)


@pytest.mark.parametrize("inside", [False, True])
def test_retry_is_refused(diary: Diary, *, inside: bool) -> None:
    def work() -> None: ...

    with pytest.raises(ConfigurationError, match=r"retry must be empty for work, which .* skyward\.distributed"):
        if inside:
            decorator(lambda: diary)(compute(retry=(OSError,))(work))
        else:
            compute(retry=(OSError,))(decorator(lambda: diary)(work))


def test_one_framework_is_enough(work: Callable[[int], int], diary: Diary) -> None:
    with pytest.raises(ConfigurationError, match="only one framework"):
        decorator(lambda: diary)(work)


def test_what_is_not_called_cannot_be_decorated(diary: Diary) -> None:
    with pytest.raises(ConfigurationError, match="decorates functions, got int"):
        decorator(lambda: diary)(3)  # type: ignore[arg-type]


def test_a_missing_framework_names_the_images_line() -> None:
    with pytest.raises(
        ConfigurationError, match=r'nowhere is not installed on node 0: .* image=sky\.Image\(pip=\["no-where"\]\)'
    ):
        imported("nowhere.distributed", pip="no-where")


def test_what_a_framework_lacks_is_its_own_error(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_there.py").write_text("import nowhere_at_all")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        imported("half_there", pip="half-there")


def test_an_unknown_backend_lists_those_there_are() -> None:
    assert checked_backend(None, ("nccl", "gloo"), "torch") is None
    assert checked_backend("gloo", ("nccl", "gloo"), "torch") == "gloo"
    with pytest.raises(
        ConfigurationError, match=r"backend of distributed\.torch must be None or one of 'nccl', 'gloo', got 'ncc'"
    ):
        checked_backend("ncc", ("nccl", "gloo"), "torch")


@pytest.mark.parametrize("framework", ["torch", "keras", "transformers"])
def test_a_decorator_without_parentheses_is_told_of_them(framework: str) -> None:
    decorate: Any = getattr(distributed, framework)

    with pytest.raises(ConfigurationError, match=rf"needs parentheses: write @sky\.distributed\.{framework}\(\)"):
        decorate(lambda: None)


def test_ports_differ_where_random_numbers_do_not() -> None:
    ports: set[int] = set()
    for _ in range(5):
        random.seed(7)
        ports.add(unused_port("127.0.0.1"))

    assert len(ports) > 1


def test_ports_differ_and_are_not_those_that_systems_hand_out() -> None:
    ports = {unused_port("127.0.0.1") for _ in range(20)}

    assert len(ports) > 15
    assert all(20_000 <= port < 32_768 for port in ports)
