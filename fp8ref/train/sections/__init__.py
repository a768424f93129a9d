"""The sections of a configuration: frozen dataclasses whose fields are the keys.

Each checks its values when it is built.
"""

from fp8ref.train.sections.data import ArchitectureConfig, DataConfig
from fp8ref.train.sections.numerics import NumericsConfig
from fp8ref.train.sections.optimizer import Decay, OptimizerConfig
from fp8ref.train.sections.parallel import ParallelConfig
from fp8ref.train.sections.run import CheckpointConfig, LogConfig, RunConfig, StatisticsConfig

__all__ = [
    "ArchitectureConfig",
    "CheckpointConfig",
    "DataConfig",
    "Decay",
    "LogConfig",
    "NumericsConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "StatisticsConfig",
]
