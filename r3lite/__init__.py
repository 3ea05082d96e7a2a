"""r3lite: teaches a small language model to reason and retrieve, step by step, on a laptop GPU."""

__version__ = "0.1.0"
