"""Ahead-of-time compilation for accelerators that are not attached, and analysis of the compiled programs."""
