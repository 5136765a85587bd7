"""Program of a template: it imports everything that the processes of a node need, and supervisors are forked from it.

Its client is its parent; :mod:`skyward.node.supervisor.template` is the client's end.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import ssl

import tornado.platform.asyncio

from skyward.node.processes import name_process
from skyward.node.supervisor import daemon, scheduler
from skyward.node.supervisor.proc_entry import fits
from skyward.node.supervisor.start_order import PROGRAM
from skyward.node.supervisor.survey import package_versions
from skyward.node.supervisor.zygote import serve_forks, take_orders
from skyward.node.worker import nannies, worker
from skyward.wire.dask_parts import load_lazy_parts

__all__ = ["main"]

_IMPORTED = (daemon, scheduler, nannies, worker, tornado.platform.asyncio)


def main(client: int) -> None:
    """Fork supervisors as ordered, in the manner of a node's zygote, until the client closes its socket or ends.

    Args:
        client: pid of the client, which is this process's parent.
    """
    name_process("template")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a client that ignores it hands that down; no child could be awaited
    if not fits(PROGRAM):  # some kernels, such as gVisor's, do not report where arguments lie
        raise RuntimeError("this kernel does not let a process show other arguments: nodes could not be found")
    orders = take_orders()
    _fill_caches()
    gc.freeze()  # collecting would write to memory that is shared with every fork
    # OpenBLAS has a thread per core once numpy is imported. It joins them before a fork, and starts them when used.
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"{threads} threads run after the imports: a fork could inherit locks that nobody releases")
    serve_forks(orders, parent=client)


def _fill_caches() -> None:
    """Fill caches that every process would fill again: the versions of packages took 40 of a worker's 130 ms."""
    if importlib.util.find_spec("numpy"):
        importlib.import_module("numpy.random")  # 16 ms in each worker, which seeds it
    package_versions()
    load_lazy_parts()
    # OpenSSL looks its algorithms up for the first two contexts of a process, which takes 8 and 3 ms, 0.3 after that.
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        ssl.SSLContext(protocol)
