from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import TimeoutError as JoblibTimeoutError

import joblib
import numpy as np
import pytest
from joblib import Parallel, delayed, parallel_backend, parallel_config
from joblib.parallel import BatchedCalls
from packaging.version import Version

import skyward_joblib
from skyward.errors import ConfigurationError, RemoteTraceback, SerializationError
from skyward_joblib import SkywardBackend
from skyward_joblib.backend import _MANY_TASKS


def square(number):
    return number * number


def thread_name(_):
    time.sleep(0.01)
    return threading.current_thread().name


def fail_at_seven(number):
    if number == 7:
        raise LookupError("seven")
    return number


def nested_pids(_):
    return Parallel(n_jobs=2)(delayed(_pid_and_threads)(n) for n in range(2)), os.getpid()


def _pid_and_threads(_):
    return os.getpid(), os.environ["OMP_NUM_THREADS"]


def blas_threads(_):
    from threadpoolctl import threadpool_info

    np.ones((2, 2)) @ np.ones((2, 2))
    return {info["num_threads"] for info in threadpool_info()}


def write_line(path, text):
    with open(path, "a") as file:
        file.write(f"{text}\n")


def fail_the_first_time(path):
    write_line(path, "tried")
    with open(path) as file:
        if len(file.readlines()) == 1:
            raise OSError("not now")


def make_unpicklable(_):
    return threading.Lock()


def backends_below(depth):
    with Parallel(n_jobs=2) as parallel:
        here = type(parallel._backend).__name__
        return [here, *(parallel([delayed(backends_below)(depth - 1)])[0] if depth else [])]


def in_fleet(names):
    return all(name.startswith("fake-worker") for name in names)


@pytest.mark.parametrize("context", [parallel_config, parallel_backend])
@pytest.mark.parametrize("n_jobs", [-1, 2, 8])
def test_loop_runs_in_the_fleet_and_keeps_order(fleet, context, n_jobs):
    with context("skyward", pool=fleet):
        assert Parallel(n_jobs=n_jobs)(delayed(square)(n) for n in range(40)) == [n * n for n in range(40)]
        assert in_fleet(Parallel(n_jobs=n_jobs)(delayed(thread_name)(n) for n in range(8)))


def test_all_workers_are_the_default(fleet_of):
    fleet = fleet_of(3)
    with parallel_config("skyward", pool=fleet):
        assert joblib.effective_n_jobs() == joblib.effective_n_jobs(None) == 3
        assert in_fleet(Parallel()(delayed(thread_name)(n) for n in range(8)))


def test_one_job_that_was_asked_for_runs_here(fleet):
    with parallel_config("skyward", pool=fleet):
        assert Parallel(n_jobs=1)([delayed(thread_name)(0)]) == [threading.current_thread().name]
    assert fleet.labels == []


@pytest.mark.parametrize(("capacity", "n_jobs"), [(1, -1), (1, 2), (1, 5), (1, None), (2, -2), (4, -10)])
def test_one_worker_that_is_left_runs_in_the_fleet_one_by_one(fleet_of, capacity, n_jobs):
    fleet = fleet_of(capacity)
    with parallel_config("skyward", pool=fleet, n_jobs=n_jobs):
        assert joblib.effective_n_jobs(n_jobs) == 2
        assert in_fleet(Parallel()(delayed(thread_name)(n) for n in range(8)))
    assert fleet.most_running == 1


@pytest.mark.parametrize(("n_jobs", "expected"), [(1, 1), (2, 2), (3, 3), (99, 8), (-1, 8), (-3, 6), (None, 8)])
def test_effective_n_jobs_counts_workers(hand_fleet, n_jobs, expected):
    hand_fleet.capacity = 8
    assert SkywardBackend(pool=hand_fleet).effective_n_jobs(n_jobs) == expected


def test_zero_jobs_have_no_meaning(hand_fleet):
    with parallel_config("skyward", pool=hand_fleet), pytest.raises(ValueError, match="n_jobs == 0 in Parallel"):
        Parallel(n_jobs=0)(delayed(square)(n) for n in range(2))


@pytest.mark.parametrize("pre_dispatch", ["2 * n_jobs", "all"])
def test_n_jobs_caps_what_runs_at_once(fleet_of, pre_dispatch):
    fleet = fleet_of(4)
    with parallel_config("skyward", pool=fleet):
        Parallel(n_jobs=2, pre_dispatch=pre_dispatch, batch_size=1)(delayed(thread_name)(n) for n in range(20))
    assert fleet.most_running == 2


def test_making_a_backend_needs_no_pool():
    assert SkywardBackend(nesting_level=1).nesting_level == 1
    assert isinstance(joblib.parallel.BACKENDS["skyward"](), SkywardBackend)


def test_what_is_no_pool_is_refused_at_once():
    with pytest.raises(ConfigurationError, match="pool must be an open ComputePool, got int"):
        parallel_config("skyward", pool=42)


def test_error_keeps_its_type_and_shows_the_remote_traceback(fleet):
    with parallel_config("skyward", pool=fleet), pytest.raises(LookupError, match="seven") as caught:
        Parallel()(delayed(fail_at_seven)(n) for n in range(100))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "fail_at_seven" in str(caught.value.__cause__)


def test_backend_is_usable_after_an_error(fleet):
    backend = SkywardBackend(pool=fleet)
    with parallel_config(backend):
        with pytest.raises(LookupError):
            Parallel()(delayed(fail_at_seven)(n) for n in range(20))
        assert Parallel()(delayed(square)(n) for n in range(3)) == [0, 1, 4]


@pytest.mark.parametrize("position", [0, 30])
def test_argument_that_cannot_be_pickled_is_named(fleet, position):
    lock = threading.Lock()
    with parallel_config("skyward", pool=fleet), pytest.raises(SerializationError, match="lock"):
        Parallel()(delayed(str)(lock if n == position else n) for n in range(60))


def test_error_of_the_task_generator_reaches_the_caller(fleet):
    def tasks():
        yield from (delayed(square)(n) for n in range(30))
        raise OSError("no more tasks")

    with parallel_config("skyward", pool=fleet), pytest.raises(OSError, match="no more tasks"):
        Parallel()(tasks())


@pytest.mark.parametrize("return_as", ["generator", "generator_unordered"])
def test_generators_yield_every_result(fleet, return_as):
    with parallel_config("skyward", pool=fleet):
        results = Parallel(return_as=return_as)(delayed(square)(n) for n in range(50))
        assert sorted(results) == [n * n for n in range(50)]


def test_dropped_generator_gives_up_its_calls(fleet):
    with parallel_config("skyward", pool=fleet):
        results = Parallel(return_as="generator", batch_size=1)(delayed(square)(n) for n in range(100_000))
        assert next(results) == 0
        with pytest.warns(UserWarning, match="tasks"):
            results.close()
        assert Parallel()(delayed(square)(n) for n in range(3)) == [0, 1, 4]


def test_loop_inside_the_consumption_of_a_generator(fleet):
    with parallel_config("skyward", pool=fleet):
        outer = Parallel(return_as="generator", batch_size=1)(delayed(square)(n) for n in range(10))
        sums = [sum(Parallel()(delayed(square)(n) for n in range(value % 5))) for value in outer]
    assert len(sums) == 10


def test_timeout_ends_the_call(fleet):
    release = threading.Event()
    with parallel_config("skyward", pool=_calling(fleet, release.wait)), pytest.raises(JoblibTimeoutError):
        Parallel(timeout=0.05)(delayed(square)(n) for n in range(4))
    release.set()


def _calling(fleet, wait):
    """The fleet, each call of which waits first."""
    run = fleet._run
    fleet._run = lambda *item: (wait(5), run(*item))
    return fleet


def test_two_threads_share_a_backend_and_one_failing_does_not_end_the_other(fleet):
    backend = SkywardBackend(pool=fleet)

    def loop(task):
        with parallel_config(backend):
            return Parallel(batch_size=1)(delayed(task)(n) for n in range(60))

    with ThreadPoolExecutor(2) as threads:
        good, bad = threads.submit(loop, square), threads.submit(loop, fail_at_seven)
        assert good.result(20) == [n * n for n in range(60)]
        with pytest.raises(LookupError):
            bad.result(20)


def test_results_that_come_at_once_do_not_recurse(ready_fleet):
    with parallel_config("skyward", pool=ready_fleet):
        assert Parallel(batch_size=1)(delayed(square)(n) for n in range(2000)) == [n * n for n in range(2000)]


def test_every_call_of_a_loop_shares_one_memo_and_the_next_has_its_own(fleet):
    with parallel_config("skyward", pool=fleet), Parallel(batch_size=1) as parallel:
        parallel(delayed(square)(n) for n in range(10))
        parallel(delayed(square)(n) for n in range(10))
    assert None not in fleet.memos
    assert len({id(memo) for memo in fleet.memos}) == 2


def test_label_names_the_task(fleet):
    with parallel_config("skyward", pool=fleet):
        Parallel(batch_size=2, pre_dispatch="all")(delayed(square)(n) for n in range(5))
    assert fleet.labels == ["square (2 tasks)", "square (2 tasks)", "square"]


def test_loop_inside_a_task_runs_in_processes_of_the_node_with_their_share_of_threads(fleet, no_loky_left):
    with parallel_config("skyward", pool=fleet):
        [(inner, outer_pid)] = Parallel()([delayed(nested_pids)(0)])
    assert outer_pid not in {pid for pid, _ in inner}
    assert {threads for _, threads in inner} == {str(max(joblib.cpu_count() // 2, 1))}


@pytest.fixture
def no_loky_left():
    yield
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True, kill_workers=True)


def test_loops_inside_loops_are_processes_then_threads_then_nothing(fleet, no_loky_left):
    with parallel_config("skyward", pool=fleet):
        assert backends_below(3) == ["SkywardBackend", "NodeBackend", "ThreadingBackend", "SequentialBackend"]


def test_inner_threads_are_limited_while_a_batch_runs(fleet_of):
    with parallel_config("skyward", pool=fleet_of(1), inner_max_num_threads=1):
        assert Parallel()([delayed(blas_threads)(0)]) == [{1}]


def test_initializer_runs_once_before_the_first_batch_of_a_worker(fleet_of, tmp_path):
    fleet, path = fleet_of(1), str(tmp_path / "lines")
    for arguments in ((path, "one"), (path, "one"), (path, "other")):
        with parallel_config("skyward", pool=fleet, initializer=write_line, initargs=arguments):
            Parallel()(delayed(square)(n) for n in range(9))
            Parallel()(delayed(square)(n) for n in range(9))
    assert (tmp_path / "lines").read_text().split() == ["one", "other"]


@pytest.mark.skipif(Version(joblib.__version__) < Version("1.5"), reason="Parallel takes no backend parameters")
def test_initializer_may_be_given_to_the_loop(fleet, tmp_path):
    with parallel_config("skyward", pool=fleet):
        Parallel(initializer=write_line, initargs=(str(tmp_path / "lines"), "one"))([delayed(square)(1)])
    assert (tmp_path / "lines").read_text() == "one\n"


def test_initializer_that_fails_ends_the_loop_and_is_tried_again_by_the_next(fleet, tmp_path):
    arguments = (str(tmp_path / "tries"),)
    with parallel_config("skyward", pool=fleet, initializer=fail_the_first_time, initargs=arguments):
        with pytest.raises(OSError, match="not now"):
            Parallel()([delayed(square)(2)])
        assert Parallel()([delayed(square)(2)]) == [4]


def test_loop_that_needs_shared_memory_runs_in_threads_here(fleet):
    with parallel_config("skyward", pool=fleet):
        names = Parallel(n_jobs=2, require="sharedmem")(delayed(thread_name)(n) for n in range(4))
    assert not any(name.startswith("fake-worker") for name in names)


def test_loop_that_would_rather_have_threads_runs_in_the_fleet(fleet):
    with parallel_config("skyward", pool=fleet):
        assert in_fleet(Parallel(n_jobs=2, prefer="threads")(delayed(thread_name)(n) for n in range(4)))


class Callback:
    """Counts how often it is called."""

    def __init__(self):
        self.futures = []
        self.called = threading.Semaphore(0)

    def __call__(self, future):
        self.futures.append(future)
        self.called.release()


@pytest.mark.parametrize("n_jobs", [2, 3])
@pytest.mark.parametrize(
    ("task", "argument", "error"),
    [
        (square, 3, None),
        (fail_at_seven, 7, LookupError),
        (make_unpicklable, 0, SerializationError),
        (square, threading.Lock(), SerializationError),
    ],
)
def test_callback_comes_exactly_once(fleet_of, task, argument, error, n_jobs):
    backend, callback = SkywardBackend(pool=fleet_of(3)), Callback()
    backend.configure(n_jobs, Parallel(n_jobs=n_jobs))
    backend.start_call()
    backend.submit(BatchedCalls([(task, (argument,), {})], backend.get_nested_backend()), callback)
    assert callback.called.acquire(timeout=5)
    backend.stop_call()
    [future] = callback.futures
    assert type(future.exception()) is (error or type(None))


@pytest.mark.parametrize("n_jobs", [1, 4])
def test_callback_comes_exactly_once_for_what_was_given_up(hand_fleet, n_jobs):
    backend, callback = SkywardBackend(pool=hand_fleet), Callback()
    backend.configure(2, Parallel(n_jobs=n_jobs))
    backend.start_call()
    for _ in range(2):
        backend.submit(BatchedCalls([(square, (1,), {})], backend.get_nested_backend()), callback)
    backend.abort_everything()
    backend.stop_call()
    assert len(callback.futures) == 2
    assert all(future.cancelled() for future in callback.futures)


def test_backend_of_nested_loops_is_small():
    import pickle

    assert len(pickle.dumps(SkywardBackend().get_nested_backend())) < 500


def test_registering_is_all_that_importing_does():
    assert joblib.parallel.DEFAULT_BACKEND == "loky"
    assert sorted(skyward_joblib.__all__) == skyward_joblib.__all__


class Batches:
    """Feeds outcomes of batches to a backend, as joblib would; the clock is the numbers it is given."""

    def __init__(self, fleet):
        self.backend = SkywardBackend(pool=fleet)
        self.backend.configure(2, Parallel(n_jobs=2))

    def complete(self, *, size, worker_s, total_s):
        future = joblib_future(worker_s)
        self.backend.retrieve_result_callback(future)
        self.backend.batch_completed(size, total_s)
        return self.backend.compute_batch_size()


def joblib_future(worker_s):
    from skyward.submission import CallFuture

    future = CallFuture()
    future.worker_seconds = worker_s
    future.set_result([])
    return future


def test_batches_grow_by_the_time_on_the_worker_not_by_the_way(hand_fleet):
    assert Batches(hand_fleet).complete(size=1, worker_s=0.001, total_s=1.0) == 64


def test_batches_grow_once_for_each_that_came_back(hand_fleet):
    batches = Batches(hand_fleet)
    size = batches.complete(size=1, worker_s=0.00001, total_s=1.0)
    assert [batches.backend.compute_batch_size() for _ in range(3)] == [size] * 3
    assert batches.complete(size=size, worker_s=0.00001 * size, total_s=1.0) == _MANY_TASKS


def test_batches_that_keep_a_worker_busy_stay_as_they_are(hand_fleet):
    batches = Batches(hand_fleet)
    assert batches.complete(size=1, worker_s=0.3, total_s=0.301) == 1


def test_long_way_makes_larger_batches(hand_fleet):
    assert Batches(hand_fleet).complete(size=1, worker_s=0.3, total_s=0.7) == 4


def test_50_ms_to_the_fleet_leave_long_tasks_alone_and_gather_short_ones_to_twice_the_way(hand_fleet):
    way_s = 0.05 * 2
    assert [Batches(hand_fleet).complete(size=1, worker_s=0.21, total_s=0.21 + way_s) for _ in range(5)] == [1] * 5
    batches, size = Batches(hand_fleet), 1
    for _ in range(30):
        size = batches.complete(size=size, worker_s=0.002 * size, total_s=0.002 * size + way_s)
    assert 2 * way_s <= 0.002 * size <= 8 * way_s


def test_wait_for_a_worker_is_not_taken_for_a_long_way(hand_fleet):
    batches = Batches(hand_fleet)
    batches.complete(size=1, worker_s=0.3, total_s=0.302)
    assert [batches.complete(size=1, worker_s=0.3, total_s=10.0 * n) for n in (1, 2, 3)] == [1, 1, 1]


def test_batch_size_starts_anew_with_every_call(hand_fleet):
    batches = Batches(hand_fleet)
    batches.complete(size=1, worker_s=0.001, total_s=0.002)
    batches.backend.terminate()
    assert batches.backend.compute_batch_size() == 1


def test_batches_of_thousands_of_tasks_grow_no_more_and_shrink_when_tasks_get_longer(hand_fleet):
    batches, size = Batches(hand_fleet), 1
    for _ in range(10):
        size = batches.complete(size=size, worker_s=0.000001 * size, total_s=1.0)
    assert _MANY_TASKS <= size < 2 * _MANY_TASKS
    for _ in range(10):
        size = batches.complete(size=size, worker_s=0.1 * size, total_s=1.0)
    assert size < 20


class Multiplier:
    def __call__(self, number, by=1):
        return number * by


@pytest.mark.parametrize(
    ("tasks", "sends_function_once"),
    [
        ([delayed(square)(n) for n in range(8)], True),
        ([delayed(pow)(n, 2) for n in range(8)], False),  # goes by name
        ([delayed(Multiplier())(n, by=n) for n in range(8)], False),  # an object, which may change between batches
        ([delayed(Multiplier())(n, by=n) if n % 2 else delayed(square)(n) for n in range(8)], False),
    ],
)
def test_function_of_all_tasks_goes_to_the_fleet_once(fleet, tasks, sends_function_once):
    submitted, submit_calls = [], fleet.submit_calls
    fleet.submit_calls = lambda calls, **options: submitted.extend(calls) or submit_calls(calls, **options)
    with parallel_config("skyward", pool=fleet):
        assert Parallel(batch_size=2)(tasks) == [n * n for n in range(8)]
    functions = {call.fn for call in submitted}
    assert len(submitted) > len(functions) == 1
    assert (tasks[0][0] not in submitted[0].args[0]) == sends_function_once
