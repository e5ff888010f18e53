"""Data, devices, checkpoints and display of `train_lm.py`."""

LAUNCHER_PIPE = "RINGJAX_LAUNCHER_PIPE"  # environment variable: a file descriptor that closes when the launcher exits
