"""The same over several devices (spec P): layouts, shards, GEMMs, summed gradients."""
