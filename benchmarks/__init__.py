"""Programs that measure every figure of the README and the docs: `make bench`, or `python -m benchmarks NAME`."""
