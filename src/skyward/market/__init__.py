"""Choice among offers, prices, and the budget."""
