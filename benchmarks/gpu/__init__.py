"""What one GPU shows of the workbench: ``python -m benchmarks.gpu``."""
