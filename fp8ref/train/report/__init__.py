"""What finished runs show: compared, judged against the noise of seeds, replayed, drawn."""
