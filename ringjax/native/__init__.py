"""Kernels for CPU in C++: compiled once on the machine that runs them, called by XLA on its own threads."""
