"""The layer grid: one row per layer, with the slices of its weight on each rank and the boxings between rows.

`view` makes the grid's plain data with `columns`, `slices` and `boxing_column`. `widget` sends them to the script.
"""
