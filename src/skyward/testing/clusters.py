"""Contract of a cluster manager for users of ``distributed``, as a suite to subclass.

::

    from distributed import LocalCluster
    from skyward.testing import ClusterConformance

    class TestLocalCluster(ClusterConformance):
        def make_cluster(self, *, workers, **options):
            return LocalCluster(n_workers=workers, threads_per_worker=1, memory_limit="1GiB", **options)

        def make_broken_cluster(self):
            return LocalCluster(n_workers=1, worker_class=WorkerThatRaises)

It needs ``pytest``, and ``pytest-asyncio`` in its automatic mode. It is written against the public interface of
``distributed.deploy.Cluster``, and one private name that notebooks call: ``_widget``.
"""

from __future__ import annotations

from skyward.testing._cluster_base import ClusterSuite
from skyward.testing._cluster_facts import ClusterFacts, ClusterSecurity
from skyward.testing._cluster_lifecycle import ClusterLifecycle
from skyward.testing._cluster_scaling import ClusterAdapting, StrictScaling

__all__ = ["ClusterConformance", "ClusterSuite", "StrictClusterConformance"]


class ClusterConformance(ClusterFacts, ClusterSecurity, ClusterLifecycle, ClusterAdapting):
    """Behaviours of ``LocalCluster`` that every cluster manager should have: subclass it, define :meth:`make_cluster`.

    The attributes of :class:`ClusterSuite` declare the limits of a manager; all other behaviours are tested.
    """


class StrictClusterConformance(StrictScaling, ClusterConformance):
    """The same, and further behaviours that ``LocalCluster`` lacks.

    Wrong numbers are refused by name, before anything happens, and scaling by hand ends adapting.
    """
