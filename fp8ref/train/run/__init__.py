"""What a run keeps and does besides steps: directory, logs, checkpoints, processes, signals."""
