"""What every room uses: errors, the console, results, files from outside, lookups by name."""
