"""What a precision costs in quality: perplexity on a text, and how far the model's answers moved from a reference."""
