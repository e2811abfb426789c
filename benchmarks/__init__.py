"""Measurements that compare two ways to do the same thing, side by side in one process; ``make bench`` runs them."""
