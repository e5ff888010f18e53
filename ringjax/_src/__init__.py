"""Private modules: they may change without notice. Import from `ringjax` and its public modules instead."""
