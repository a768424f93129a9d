"""The operands of attention: checked, rotated, scaled, cast, cut among ranks."""
