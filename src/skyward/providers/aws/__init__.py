"""Provider of EC2 machines.

``provider`` implements the five verbs. ``offering`` turns a request into offers, from ``machine_types``, prices and
``quotas``. ``launching`` launches an order; ``teardown`` terminates machines and removes the rest. They share
``account`` (cached facts), ``network``, ``boot`` (images, keys, cloud-config), ``payloads`` (EC2's JSON), ``api``
(calls with retries) and ``errors`` (the table of refusals). ``ssm`` is a program that carries SSH.
"""
