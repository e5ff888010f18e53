"""The ways to run a branch, one file each, all with the protocol of `protocol.py`."""
