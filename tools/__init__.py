"""What make, linters of notebooks and the documentation need: each file runs by itself, ``python -m tools.NAME``."""
