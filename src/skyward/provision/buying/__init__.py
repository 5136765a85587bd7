"""Purchases: choice of offers, costs, the ledger, and the certain end of machines."""
