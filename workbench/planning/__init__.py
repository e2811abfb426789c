"""The search for the best strategy, and explanations of its result. No torch, no devices."""
