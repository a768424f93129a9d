"""Which parts of a model a recipe converts, one rule for both backends, and the report of it."""
