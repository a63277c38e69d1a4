"""Descriptions of models: sizes, what layers compute, and Hugging Face's names of weights. Holds no weights."""
