"""What `make check` runs besides the linters themselves."""
