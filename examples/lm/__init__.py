"""The machinery of `train_lm.py`: data, devices, checkpoints and what a person sees."""

LAUNCHER_PIPE = "RINGJAX_LAUNCHER_PIPE"  # environment variable: a descriptor that closes when the launcher ends
