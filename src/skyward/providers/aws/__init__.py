"""Provider of EC2 machines.

``provider`` implements the five verbs, ``offering`` turns a request into offers, ``launching`` launches an order,
``teardown`` terminates machines and removes the rest; ``docs/architecture.md`` has the map.
"""
