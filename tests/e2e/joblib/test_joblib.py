"""joblib and scikit-learn on real pools of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import joblib
import numpy as np
import pytest
from joblib import Parallel, delayed, parallel_config
from joblib.parallel import BatchedCalls, get_active_backend

import skyward as sky
from skyward.errors import PoolStateError, RemoteTraceback, WorkerLostError
from skyward_joblib import JoblibPool, ScikitLearnPool, SkywardBackend, joblib_backend


@pytest.fixture(scope="module")
def pool(start_callbacks):
    with sky.ComputePool(provider=sky.Local(), nodes=2, display="quiet") as pool:
        start_callbacks(pool)
        yield pool


@pytest.fixture
def backend(pool):
    with joblib_backend(pool):
        yield


def pid(_):
    return os.getpid()


def fail(number):
    raise LookupError(f"number {number}")


def add_one_in_place(array):
    array += 1
    return array.sum()


def nested_pids(_):
    pids = Parallel(n_jobs=2)(delayed(pid)(n) for n in range(2))
    return {"here": os.getpid(), "there": pids}


def die_once(path, number):
    if number == 3 and not os.path.exists(path):
        with open(path, "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return number


def die(_):
    os._exit(3)


def sleep_or_fail(seconds):
    if seconds is None:
        raise LookupError("the first task")
    time.sleep(seconds)


def wait_for(path, number):
    while number == 0 and not os.path.exists(path):
        time.sleep(0.01)
    return number


def write_pid(path):
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")


def use_a_pool(_):
    with parallel_config("skyward"):
        return Parallel()(delayed(pid)(n) for n in range(2))


@pytest.mark.usefixtures("backend")
def test_loop_runs_on_the_pools_workers():
    pids = Parallel(n_jobs=-1, batch_size=1)(delayed(pid)(n) for n in range(50))
    assert len(set(pids)) == 2
    assert os.getpid() not in pids


@pytest.mark.usefixtures("backend")
def test_many_small_tasks_keep_their_order():
    assert Parallel()(delayed(abs)(-n) for n in range(20_000)) == list(range(20_000))


@pytest.mark.usefixtures("backend")
def test_error_keeps_its_type_and_shows_the_remote_traceback():
    with pytest.raises(LookupError, match="number") as caught:
        Parallel()(delayed(fail)(n) for n in range(20))
    assert isinstance(caught.value.__cause__, RemoteTraceback)


@pytest.mark.usefixtures("backend")
def test_large_array_is_writable_in_every_task_and_unchanged_here():
    array = np.zeros(1_000_000)
    assert Parallel(batch_size=1)(delayed(add_one_in_place)(array) for _ in range(8)) == [1_000_000.0] * 8
    assert not array.any()


@pytest.mark.usefixtures("backend")
def test_loop_inside_a_task_has_processes_of_its_own():
    [pids] = Parallel()([delayed(nested_pids)(0)])
    assert pids["here"] not in pids["there"]


@pytest.mark.usefixtures("backend")
def test_worker_that_dies_costs_a_retry_not_the_loop(tmp_path):
    path = str(tmp_path / "died")
    assert Parallel(batch_size=1)(delayed(die_once)(path, n) for n in range(12)) == list(range(12))


@pytest.mark.usefixtures("backend")
def test_worker_that_is_killed_in_the_middle_of_a_batch_costs_a_retry_of_the_batch(tmp_path):
    path = str(tmp_path / "died")
    assert Parallel(batch_size=6)(delayed(die_once)(path, n) for n in range(24)) == list(range(24))


def test_callback_comes_exactly_once_for_a_call_whose_worker_was_lost(pool):
    backend, futures, called = SkywardBackend(pool=pool), [], threading.Event()
    backend.configure(2, Parallel(n_jobs=2))
    backend.start_call()
    batch = BatchedCalls([(die, (0,), {})], backend.get_nested_backend())
    backend.submit(batch, lambda future: (futures.append(future), called.set()))
    assert called.wait(30)
    backend.stop_call()
    [future] = futures
    assert isinstance(future.exception(), WorkerLostError)


@pytest.mark.usefixtures("backend")
def test_first_error_ends_the_loop_at_once_and_frees_the_workers():
    started = time.perf_counter()
    with pytest.raises(LookupError, match="the first task"):
        Parallel(n_jobs=2)(delayed(sleep_or_fail)(seconds) for seconds in [None] + [10] * 99)
    raised = time.perf_counter()
    assert raised - started < 6  # the others would take ten each
    assert len(Parallel(batch_size=1)(delayed(pid)(n) for n in range(4))) == 4
    assert time.perf_counter() - raised < 6


@pytest.mark.usefixtures("backend")
def test_timeout_ends_what_runs_and_frees_the_workers():
    with pytest.raises(multiprocessing.TimeoutError):
        Parallel(n_jobs=2, timeout=0.2)(delayed(sleep_or_fail)(60) for _ in range(4))
    started = time.perf_counter()
    assert len(Parallel(batch_size=1)(delayed(pid)(n) for n in range(4))) == 4
    assert time.perf_counter() - started < 20


@pytest.mark.usefixtures("backend")
def test_ctrl_c_ends_the_loop_and_leaves_the_pool_usable():
    started = time.perf_counter()
    later = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    later.start()
    with pytest.raises(KeyboardInterrupt):
        Parallel(n_jobs=2)(delayed(sleep_or_fail)(60) for _ in range(8))
    assert time.perf_counter() - started < 20
    later.join()
    assert Parallel()(delayed(abs)(-n) for n in range(4)) == [0, 1, 2, 3]


@pytest.mark.usefixtures("backend")
def test_unordered_generator_gives_results_while_others_are_made(tmp_path):
    path = tmp_path / "go"
    results = Parallel(n_jobs=2, batch_size=1, return_as="generator_unordered")(
        delayed(wait_for)(str(path), n) for n in range(9)
    )
    assert sorted(next(results) for _ in range(8)) == list(range(1, 9))
    path.touch()
    assert list(results) == [0]


def test_initializer_runs_once_in_every_worker_that_is_used(pool, tmp_path):
    path = tmp_path / "pids"
    with parallel_config("skyward", pool=pool, initializer=write_pid, initargs=(str(path),)):
        used = {n for _ in range(3) for n in Parallel(batch_size=1)(delayed(pid)(n) for n in range(20))}
    initialized = [int(line) for line in path.read_text().split()]
    assert sorted(initialized) == sorted(used)


@pytest.mark.usefixtures("backend")
def test_task_that_always_kills_its_worker_is_reported():
    with pytest.raises(WorkerLostError):
        Parallel()([delayed(die)(0)])


@pytest.mark.usefixtures("backend")
def test_loop_on_the_fleet_inside_a_task_is_refused():
    with pytest.raises(PoolStateError, match="pool"):
        Parallel()([delayed(use_a_pool)(0)])


def test_innermost_open_pool_is_found(pool):
    with parallel_config("skyward"):
        assert joblib.effective_n_jobs() == pool.capacity
        assert Parallel()([delayed(pid)(0)]) != [os.getpid()]


def test_joblib_pool_is_the_backend_while_it_is_open_and_its_one_worker_does_the_work():
    with JoblibPool(provider=sky.Local(), display="quiet") as pool:
        assert isinstance(pool, sky.ComputePool)
        assert isinstance(get_active_backend()[0], SkywardBackend)
        assert Parallel(n_jobs=-1)([delayed(pid)(0)]) != [os.getpid()]
    assert not isinstance(get_active_backend()[0], SkywardBackend)
    assert not pool.is_active


# In `make test`: unit/skyward_joblib/test_sklearn.py.
@pytest.mark.full
def test_grid_search_finds_what_it_finds_here():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    images, labels = (values[:400] for values in load_digits(return_X_y=True))
    search = GridSearchCV(SVC(), {"C": [1, 10], "gamma": [0.001, 0.01]}, cv=3)
    expected = search.fit(images, labels).best_score_
    with ScikitLearnPool(provider=sky.Local(), nodes=2, display="quiet"):
        assert search.fit(images, labels).best_score_ == expected
