"""A worker keeps the memory that its calls have freed for the next calls, and returns it once it is idle."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, time
from skyward.node.worker.call_runner import CallRunner, ReceivedCall, SentFunction
from skyward.node.worker.output import CallOutput
from skyward.shipping.pickling import pack
from skyward.wire.messages import Payload

BLOCK = 100 << 10
seen = {"faults": [], "resident": [], "limits": []}
now = [0.0]
time.perf_counter = lambda: now[0]


def use_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"1") * BLOCK for _ in range(160)]
    del blocks
    seen["faults"].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)


class Outlet:
    kept_bytes = 0
    wake = flush = flush_soon = flush_later = lambda self: None
    push = lambda self, item, *, bulk=False: None

    def wait(self, timeout_s, *, eager=False):
        with open("/proc/self/statm") as statm:
            seen["resident"].append(int(statm.read().split()[1]) * resource.getpagesize())
        seen["limits"].append(timeout_s)
        if timeout_s is None:
            runner.close()
        else:
            now[0] += timeout_s


runner = CallRunner(Outlet(), CallOutput(lambda *_: None), ())
function = SentFunction("it", Payload(), loaded=use_memory)
nothing = pack(((), {}), what="no arguments").data
runner.add(ReceivedCall(number, function, number, False, nothing) for number in (1, 2, 3))
runner.work()
print(json.dumps(seen))
"""


def uses_glibc() -> bool:
    try:
        return sys.platform == "linux" and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (ValueError, OSError):
        return False


@pytest.mark.skipif(not uses_glibc(), reason="other C libraries keep memory by their own rules")
def test_calls_use_freed_memory_again_and_an_idle_worker_returns_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    seen = json.loads(done.stdout)

    first, *later = seen["faults"]
    assert max(later) < first / 4
    busy, idle = seen["resident"]
    assert busy - idle >= 8 << 20
    assert seen["limits"][1:] == [None]
