"""The libraries whose casts and scales are compared with the simulator."""
