"""Attention kernels: plain XLA, Pallas for TPU and GPU, C++ for CPU, and the choice between them."""
