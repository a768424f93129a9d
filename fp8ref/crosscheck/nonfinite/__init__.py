"""Where a step that failed became non-finite: the step is run again in the simulator and in the backend (SEMANTICS K-9)."""
