"""A tensor as a layer receives it: a rank's part of a DTensor, an input under autocast."""
