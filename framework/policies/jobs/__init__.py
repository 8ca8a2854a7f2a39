"""How many workers and parameter servers each of many training jobs gets."""
