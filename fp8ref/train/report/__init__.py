"""Reports on finished runs: compare, judge FP8 against bf16 seeds, re-scale amaxes, draw."""
