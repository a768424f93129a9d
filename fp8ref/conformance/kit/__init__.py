"""What every kind of subject shares: arrays, calls, findings, comparisons, explanations."""
