"""The machinery of `train_lm.py`: data, devices, checkpoints and what a person sees."""
