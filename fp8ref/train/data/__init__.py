"""Where the tokens come from, and their order (SEMANTICS D)."""
