"""Training data: sources, tokenizers, token shards, reproducible batches (SEMANTICS D)."""
