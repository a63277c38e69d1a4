"""Ways to run one model, each on several batch sizes, as the articles about BLOOM compare them."""
