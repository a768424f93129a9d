"""Training data: sources, tokenizers, token shards, reproducible batches (spec D)."""
