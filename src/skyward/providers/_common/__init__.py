"""Parts that providers of rented machines share. A provider brings its API; no vendor's word is in here.

``rest_client`` calls an API, ``refusals`` classifies its errors, ``answer_file`` caches its answers on disk.
``machine_catalogue`` turns a request into machine types, ``offer_list`` those into offers. ``create_once`` launches an
order, ``until_gone`` terminates machines. ``ssh_keys``, ``boot`` and ``client_address`` make machines safe.
``rented_machines`` is the base of a provider, made of all these.
"""
