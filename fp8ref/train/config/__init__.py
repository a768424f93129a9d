"""The configuration of a run: one TOML file for both backends, and its checks."""

from fp8ref.train.config.config import Config, differences, from_dict, load, to_dict
from fp8ref.train.config.options import override

__all__ = ["Config", "differences", "from_dict", "load", "override", "to_dict"]
