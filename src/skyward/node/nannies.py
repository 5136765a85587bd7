"""The program of a node's nanny process. It gets the fork server going before it loads anything itself."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

from skyward.node._program import read_plan, run_program, take_standard_output

__all__ = ["main"]


def main() -> None:
    """Run the node's nannies until the supervisor's end of standard input closes.

    Workers are forked from a process that has imported all they need, which is under way while this one and the
    scheduler still import Dask: the first worker is up half a second sooner, and a killed one is back in a third of
    one.
    """
    plan, reports = read_plan(), take_standard_output()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["skyward.node.worker"])
    forkserver.ensure_running()
    from skyward.node.slots import keep_slots

    run_program(keep_slots, plan, reports)
