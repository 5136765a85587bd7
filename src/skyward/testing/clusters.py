"""What users of ``distributed`` expect of a cluster manager, as a suite to subclass.

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
from skyward.testing._cluster_facts import ClusterFacts
from skyward.testing._cluster_lifecycle import ClusterLifecycle
from skyward.testing._cluster_scaling import ClusterAdapting, StrictScaling
from skyward.testing._cluster_security import ClusterSecurity

__all__ = ["ClusterConformance", "ClusterSuite", "StrictClusterConformance"]


class ClusterConformance(ClusterFacts, ClusterSecurity, ClusterLifecycle, ClusterAdapting):
    """What ``LocalCluster`` does, and every cluster manager should: subclass it, and say how to make a cluster.

    What a manager cannot do is declared by the attributes of :class:`ClusterSuite`; what is left then is tested.
    """


class StrictClusterConformance(StrictScaling, ClusterConformance):
    """The same, and what users would expect although ``LocalCluster`` does not do it.

    Wrong numbers are refused by name, before anything happens, and scaling by hand ends adapting.
    """
