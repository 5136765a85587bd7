"""The tests that ``python tests/gpu`` runs, on a machine that has an NVIDIA GPU, torch and Skyward's requirements."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import skyward as sky
from skyward.errors import ConfigurationError
from skyward.node.gpu.driver import NvidiaDriver
from skyward.node.gpu.nvml import import_nvml, instance_profiles, open_nvml

__all__ = ["NEVER_RUN", "Accelerators", "Devices", "Driver", "Failures", "Training", "machine"]

DEADLINE_S = 120.0
MIB = 1 << 20

NEVER_RUN = [("making MIG partitions", "it changes the settings of the machine's GPUs")]
"""What these tests leave out on every machine, and why."""


def machine() -> list[str]:
    """Return lines that name the machine's Python, torch and GPUs."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return [f"{versions}, {len(names)} GPU(s): {', '.join(names)}"]


def open_pool(**options: Any) -> sky.ComputePool:
    return sky.ComputePool(**({"provider": sky.Local(), "display": "quiet"} | options))


def wait_until(reached: Callable[[], object]) -> None:
    started = time.monotonic()
    while not reached():
        if time.monotonic() > started + DEADLINE_S:
            raise AssertionError(f"nothing came within {DEADLINE_S:g} s")
        time.sleep(0.1)


@sky.compute
def device() -> tuple[str | None, str | None, list[str], int]:
    """Return the worker's CUDA_VISIBLE_DEVICES, its accelerators, and the number of devices that torch finds."""
    import torch

    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return shown, sky.current_accelerator(), list(sky.instance_info().accelerators), torch.cuda.device_count()


def model() -> str:
    """Return the name that Skyward has for this machine's GPU."""
    with open_pool() as pool:
        name = (device() >> pool)[1]
    assert name is not None
    return name


def known_model() -> str:
    name = model()
    try:
        open_pool(accelerator=name)
    except ConfigurationError as error:
        raise unittest.SkipTest(f"this GPU is not in Skyward's catalogue: {error}") from None
    return name


class Accelerators(unittest.TestCase):
    def test_metrics_show_every_gpu_and_the_memory_that_a_call_uses(self) -> None:
        events: list[sky.Metrics] = []
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        release = os.path.join(folder.name, "release")

        @sky.compute
        def use_memory() -> int:
            import torch

            held = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
            while not os.path.exists(release):
                time.sleep(0.05)
            return int(held[0])

        with open_pool() as pool:
            pool.on(sky.Metrics, events.append)
            future = pool.submit(use_memory.local)
            try:
                wait_until(lambda: any(gpu.memory_used_mb >= 512 for event in events for gpu in event.gpus))
            finally:
                Path(release).touch()
            self.assertEqual(future.result(timeout=DEADLINE_S), 1)

        shown = [gpu for event in events for gpu in event.gpus]
        memory_mib = torch.cuda.get_device_properties(0).total_memory / MIB
        self.assertEqual({gpu.index for gpu in shown}, set(range(torch.cuda.device_count())))
        self.assertIn(torch.cuda.get_device_name(0), {gpu.name for gpu in shown})
        self.assertAlmostEqual(shown[0].memory_total_mb, memory_mib, delta=0.1 * memory_mib)

    def test_current_accelerator_is_the_gpus_model(self) -> None:
        with open_pool() as pool:
            _, name, _, _ = device() >> pool

        self.assertIsNotNone(name)
        self.assertIn(str(name).split("-")[0].lower(), torch.cuda.get_device_name(0).lower().replace(" ", "-"))

    def test_instance_info_names_every_gpu_of_the_worker(self) -> None:
        with open_pool() as pool:
            _, name, names, count = device() >> pool

        self.assertEqual(count, torch.cuda.device_count())
        self.assertEqual(len(names), count)
        self.assertEqual(names[0], name)

    def test_a_pool_that_requests_the_gpu_by_name_opens(self) -> None:
        name = known_model()
        with open_pool(accelerator=name) as pool:
            _, shown, names, count = device() >> pool

        self.assertEqual((shown, names, count), (name, [name], 1))

    def test_a_pool_that_requests_another_gpu_is_refused(self) -> None:
        other = "T4" if known_model() != "T4" else "H100"
        with self.assertRaises(sky.SkywardError) as raised, open_pool(accelerator=other):
            self.fail("it opened")

        self.assertIn(other, str(raised.exception))


class Driver(unittest.TestCase):
    """Reading of GPUs and MIG partitions; none is made or removed."""

    def test_every_gpu_and_its_partitions_are_read(self) -> None:
        driver = NvidiaDriver()
        gpus = driver.gpus()
        assert gpus is not None

        self.assertEqual([each.index for each in gpus], list(range(len(gpus))))
        for gpu in gpus:
            with self.subTest(gpu=str(gpu), mig=gpu.mig):
                parts = list(driver.partitions(gpu))
                if gpu.mig:
                    self.assertTrue(all(part.profile and part.shown_as.startswith("MIG-") for part in parts))
                else:
                    self.assertGreater(gpu.memory_gib, 0)
                    self.assertEqual((parts, list(driver.instances(gpu.index))), ([], []))

    def test_the_profiles_that_a_gpu_supports_have_nvidias_names(self) -> None:
        module = open_nvml(import_nvml)
        assert module is not None
        self.addCleanup(module.nvmlShutdown)

        names = [each.name for each in instance_profiles(module, module.nvmlDeviceGetHandleByIndex(0))]

        for name in names:
            self.assertRegex(name, r"^[1-8]g\.\d+gb")
        if not names:
            raise unittest.SkipTest("this GPU lists no MIG profile, or lists them in MIG mode only")


class Devices(unittest.TestCase):
    def test_workers_of_one_gpu_share_it(self) -> None:
        name = known_model()
        with open_pool(accelerator=name, concurrency=2) as pool:
            seen = device() @ pool

        self.assertEqual([count for *_, count in seen], [1, 1])
        self.assertEqual(len({shown for shown, *_ in seen}), 1)

    def test_each_worker_has_gpus_of_its_own(self) -> None:
        gpus = torch.cuda.device_count()
        if gpus < 2:
            raise unittest.SkipTest(f"it needs two GPUs, this machine has {gpus}")
        with open_pool(accelerator=f"{known_model()}:2", concurrency=2) as pool:
            seen = device() @ pool

        self.assertEqual([count for *_, count in seen], [1, 1])
        self.assertEqual(len({shown for shown, *_ in seen}), 2)


class Training(unittest.TestCase):
    def test_nccl_with_a_world_of_one(self) -> None:
        if not torch.distributed.is_nccl_available():
            raise unittest.SkipTest("this torch is built without NCCL")

        @sky.compute
        @sky.distributed.torch("nccl")
        def reduce() -> tuple[str, int, float, str]:
            import torch
            from torch import distributed

            total = torch.ones(4, device="cuda")
            distributed.all_reduce(total)
            return distributed.get_backend(), distributed.get_world_size(), float(total.sum()), total.device.type

        with open_pool() as pool:
            self.assertEqual(list(reduce() @ pool), [("nccl", 1, 4.0, "cuda")])

    def test_gloo_reduces_cuda_tensors_of_two_processes(self) -> None:
        if not torch.distributed.is_gloo_available():
            raise unittest.SkipTest("this torch is built without gloo")

        @sky.compute
        @sky.distributed.torch("gloo")
        def reduce() -> tuple[int, float, str]:
            import torch
            from torch import distributed

            total = torch.full((4,), float(distributed.get_rank() + 1), device="cuda")
            distributed.all_reduce(total)
            return distributed.get_world_size(), float(total[0]), total.device.type

        with open_pool(concurrency=2) as pool:
            self.assertEqual(list(reduce() @ pool), [(2, 3.0, "cuda")] * 2)


class Failures(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.runs = Path(folder.name) / "runs"

    def test_a_call_that_exceeds_the_gpus_memory_raises_its_own_error_and_runs_once(self) -> None:
        runs = str(self.runs)

        @sky.compute
        def exceed() -> None:
            import torch

            with open(runs, "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")
            total = torch.cuda.get_device_properties(0).total_memory
            torch.empty(2 * total, dtype=torch.uint8, device="cuda")

        @sky.compute
        def pid() -> int:
            return os.getpid()

        with open_pool() as pool:
            with self.assertRaisesRegex(RuntimeError, "out of memory"):
                exceed() >> pool
            after = pid() >> pool

        self.assertEqual([int(line) for line in self.runs.read_text(encoding="utf-8").split()], [after])

    def test_the_call_of_a_killed_gpu_worker_runs_again_and_its_memory_is_free(self) -> None:
        runs = str(self.runs)

        @sky.compute
        def die_once() -> tuple[int, int]:
            import torch

            with open(runs, "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()}\n")
            free, _ = torch.cuda.mem_get_info()
            if Path(runs).read_text(encoding="utf-8").count("\n") == 1:
                held = torch.ones(free // 2, dtype=torch.uint8, device="cuda")
                torch.cuda.synchronize()
                os.kill(os.getpid(), signal.SIGKILL)
                del held
            return os.getpid(), free

        with open_pool() as pool:
            pid, free = die_once() >> pool

        first, second = map(int, self.runs.read_text(encoding="utf-8").split())
        self.assertEqual(pid, second)
        self.assertNotEqual(first, second)
        self.assertGreater(free, torch.cuda.get_device_properties(0).total_memory * 0.6)

    def test_nothing_of_a_closed_pool_is_left_on_the_gpu(self) -> None:
        @sky.compute
        def use_the_gpu() -> int:
            import torch

            torch.ones(MIB, device="cuda")
            return os.getpid()

        with open_pool() as pool:
            pid = use_the_gpu() >> pool

        query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        try:
            listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise unittest.SkipTest(f"nvidia-smi does not list processes: {error}") from None
        self.assertNotIn(str(pid), listed)
