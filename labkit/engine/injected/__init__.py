"""Models without a row: transformers' own code, with its linears, MLPs and tied embeddings on labkit's kernels."""
