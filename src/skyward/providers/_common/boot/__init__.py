"""Orders by which a rented machine starts, is reached, and ends itself.

``first_boot`` is for virtual machines, ``container_boot`` with ``boot.sh`` for containers. ``delete_script`` and
``dead_man`` are programs by which a machine deletes itself with a secret that it gets over SSH.
"""
