"""Job functions: `function` is what a program calls; `driver` ships it to engines; the rest runs on every rank."""
