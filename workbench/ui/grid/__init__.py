"""The layer grid: one row per layer, who holds what, and the boxings between rows.

`view` is what it shows as plain data, made of `columns`, `slices` and `flow`; `widget` hands it to the script,
`static` draws it without one.
"""
