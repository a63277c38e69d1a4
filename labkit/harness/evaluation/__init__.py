"""The quality that a precision costs: perplexity on a text, and the model's distance from a reference."""
