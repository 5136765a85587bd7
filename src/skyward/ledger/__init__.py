"""The ledger of machines: what was created, who owns it, how it ends."""
