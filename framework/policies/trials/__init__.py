"""Which trials of a search run, and where."""
