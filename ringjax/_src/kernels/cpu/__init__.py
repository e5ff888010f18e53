"""C++ kernels for CPU: compiled once on the machine that runs them, called by XLA on its own threads."""
