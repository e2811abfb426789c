"""What make, the linters of notebooks and the documentation need: each file is run by itself, ``python -m tools.NAME``."""
