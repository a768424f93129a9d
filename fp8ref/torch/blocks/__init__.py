"""Parts of a block whose values are cast in the pass that computes them: ``parts``."""
