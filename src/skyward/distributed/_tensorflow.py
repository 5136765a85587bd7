"""TensorFlow on the workers of a call: its cluster, which strategies read from ``TF_CONFIG``."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from skyward.distributed._gang import Decorator, Gang, decorator, environment, imported, unused_port
from skyward.distributed.runtime import FreshProcessNeeded, current_call


def tensorflow() -> Decorator:
    """Run the function with ``TF_CONFIG`` set, so that a ``MultiWorkerMirroredStrategy`` spans the call's workers.

    TensorFlow joins a cluster only once in a process, before any other use. A worker that has used it is therefore
    replaced before the function runs, and the state of its process is lost.

    Raises:
        ConfigurationError: in the call: tensorflow is not installed on the node.
    """
    return decorator(TensorflowSession)


class TensorflowSession:
    """Cluster of one training.

    Attributes:
        port: port of TensorFlow's server.
        gpus: always empty.
    """

    def __init__(self) -> None:
        tf: Any = imported("tensorflow", pip="tensorflow")
        self._alone = current_call() is None
        if not self._alone and _in_use(tf):
            raise FreshProcessNeeded("TensorFlow is already in use in this process, and cannot join a cluster any more")
        self.gpus = ()
        self.port = 0 if self._alone else unused_port("0.0.0.0")  # noqa: S104 - its server takes every address

    @contextmanager
    def join(self, gang: Gang) -> Generator[None]:
        """See :meth:`~skyward.distributed._gang.GangSession.join`."""
        if self._alone:  # outside a pool TensorFlow may already be in use, and needs no cluster
            yield
            return
        # TensorFlow's server listens on every address and has no option for one: docs/training.md names the remedy.
        with environment({"TF_CONFIG": cluster(gang)}):
            yield


def cluster(gang: Gang) -> str:
    """Return ``TF_CONFIG`` of this worker."""
    workers = [f"{peer.address}:{peer.port}" for peer in gang.peers]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": gang.rank}})


def _in_use(tf: Any) -> bool:
    """Return True if TensorFlow is in use: it then refuses another number of threads."""
    threading = tf.config.threading
    threads = threading.get_intra_op_parallelism_threads()
    try:
        threading.set_intra_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    threading.set_intra_op_parallelism_threads(threads)
    return False
