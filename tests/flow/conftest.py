"""Programs of documents are run by tests, not imported to look for examples in them."""

collect_ignore_glob = ["programs/*"]
