"""Hugging Face's interface to the engine: causal language models, encoders, and the loop that generates."""
