"""Provider of EC2 machines.

``provider`` implements the five verbs, ``offering`` turns a request into offers, ``launching`` launches an order,
terminates machines and removes the rest. ``account`` reads and writes EC2's JSON, ``api`` makes the calls, and ``ssm``
reaches machines without a public address.
"""
