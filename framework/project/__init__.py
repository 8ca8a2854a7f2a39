"""The user's project: its bundle, entry point, model profile and run folders."""
