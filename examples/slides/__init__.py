"""Parts of `examples/slide_encoder.py` and `examples/slide_classification.py`."""
