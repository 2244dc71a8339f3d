"""One folder for each operation: `reference.py`, later `triton.py`, and the dispatch between."""
