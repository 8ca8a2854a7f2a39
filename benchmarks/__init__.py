"""Every figure in the README and the docs, as a program: `make bench`, or `python -m benchmarks NAME`."""
