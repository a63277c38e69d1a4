"""Methods of running one model, each on several batch sizes, as in the articles about BLOOM."""
