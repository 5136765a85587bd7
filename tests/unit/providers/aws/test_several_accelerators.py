"""Requests for any of many accelerators, at EC2."""

from __future__ import annotations

import asyncio
from collections import Counter

from skyward.providers.aws.provider import AWS
from skyward.providers.base import matching_offers
from skyward.request.accelerators import Accelerator
from skyward.request.request import parse_request
from skyward.testing.aws import LocalEC2


def test_the_account_is_looked_at_once_for_many_accelerators(ec2: LocalEC2) -> None:
    request = parse_request(accelerator=Accelerator.any(memory=">=16GB", vendor="nvidia"), spot="if-available")

    async def scenario() -> None:
        provider = AWS(endpoint_url=ec2.endpoint_url)
        offers = await matching_offers(provider, request)
        await provider.close()
        assert {offer.spec.accelerator for offer in offers} > {"T4", "L4", "A10G"}

    asyncio.run(scenario())
    calls = Counter(ec2.actions)
    assert [calls[name] for name in ("DescribeVpcs", "DescribeSubnets", "DescribeInstanceTypes")] == [1, 1, 1]
