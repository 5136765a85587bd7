"""EC2 on this machine: an API with faults, scarce capacity and prices, and a real host for every instance.

``local_ec2`` is the entry, and answers calls: planned faults first, then ``ec2_market`` (types, prices, capacity), then
fleets and moto, whose instances ``region`` gives real hosts.
"""

from __future__ import annotations

from skyward.testing.aws.ec2_market import Capacity, Market
from skyward.testing.aws.local_ec2 import AwsFault, LocalEC2, use_ec2
from skyward.testing.aws.region import Looks, UserData

__all__ = ["AwsFault", "Capacity", "LocalEC2", "Looks", "Market", "UserData", "use_ec2"]
