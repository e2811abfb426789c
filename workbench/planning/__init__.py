"""Which strategy: the search over strategies, and why it chose what it chose. No torch, no devices."""
