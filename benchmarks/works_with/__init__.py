"""Libraries that are built on Lightning, trained with our callbacks: ``python -m benchmarks.works_with --help``."""
