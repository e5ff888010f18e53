"""The implementation on TPU: Pallas (Mosaic) kernels over packed rows."""
