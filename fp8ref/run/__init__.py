"""Around a backend: configuration, data, the training loop, its records and pictures. No numerics of its own."""
