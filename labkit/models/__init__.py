"""What a model is: its sizes, what its layers compute, and how Hugging Face names its weights. Knows no weights."""
