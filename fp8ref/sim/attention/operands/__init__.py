"""The operands of attention: checked, rotated, scaled, cast, padded to steps."""
