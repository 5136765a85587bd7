"""Provider of EC2 machines.

``provider`` implements the five verbs and launches an order, ``offering`` turns a request into offers. ``account``
reads and writes EC2's JSON, ``api`` makes the calls, ``ssm`` reaches machines without a public
address, and ``s3`` keeps volumes, for machines of every provider.
"""
