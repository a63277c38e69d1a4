"""Files, processes and the terminal: what the other rooms share and what knows nothing of models."""
