"""Parts that providers of rented machines share. A provider brings its API; no vendor's word is in here.

``rest_client`` calls an API, ``payloads`` decodes its answers, ``refusals`` classifies its errors, ``cached_answers``
keeps answers of calls with a quota. ``machine_catalogue`` turns a request into machine types and offers.
``create_once`` launches an order. ``logins`` and ``machine_boot`` make machines safe. ``rented_machines`` terminates
machines, and is the base of a provider, made of all these.
"""
