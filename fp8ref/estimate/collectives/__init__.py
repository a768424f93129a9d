"""The collectives of a step: tensors, and the amaxes and scales that go with them."""
