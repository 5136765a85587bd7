"""VastAI: containers on a marketplace of hosts, on demand or by bids, billed from prepaid credit."""
