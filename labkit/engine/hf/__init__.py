"""Hugging Face interface of the engine: causal language models, encoders, and the generation loop."""
