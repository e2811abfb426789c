"""Job functions: programs call `function`; `driver` sends jobs to engines; the other modules run on every rank."""
