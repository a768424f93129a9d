"""What a config would take, before anything is built: memory, GEMMs, traffic, time."""
