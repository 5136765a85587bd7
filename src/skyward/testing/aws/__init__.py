"""EC2 on this machine: an API with faults, scarce capacity and prices, and a real host for every instance.

``local_ec2`` is the entry. ``api_server`` answers calls: planned faults first, then ``ec2_market`` (types, prices,
capacity), ``instant_fleets`` and moto, whose instances ``region`` replaces by ``emulated_machine``. ``api_messages``
has the formats of requests and responses.
"""

from __future__ import annotations

from skyward.testing.aws.api_server import AwsFault
from skyward.testing.aws.ec2_market import Capacity, Market
from skyward.testing.aws.emulated_machine import UserData
from skyward.testing.aws.local_ec2 import LocalEC2, use_ec2
from skyward.testing.aws.region import Looks

__all__ = ["AwsFault", "Capacity", "LocalEC2", "Looks", "Market", "UserData", "use_ec2"]
