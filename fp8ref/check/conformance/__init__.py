"""What holds anybody's casts, scales and quantisers to the specification."""
