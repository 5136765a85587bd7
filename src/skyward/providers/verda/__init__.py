"""Verda: virtual machines with GPUs in the Nordic countries and elsewhere, billed from a prepaid balance."""
