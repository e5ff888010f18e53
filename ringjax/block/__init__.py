"""A block of queries against a block of keys, per backend."""
