"""The sections of a configuration: frozen dataclasses whose fields are the keys.

Each checks its values when it is built.
"""

from fp8ref.train.config.sections.data import ArchitectureConfig, DataConfig
from fp8ref.train.config.sections.numerics import NumericsConfig
from fp8ref.train.config.sections.optimizer import Decay, OptimizerConfig
from fp8ref.train.config.sections.parallel import ParallelConfig
from fp8ref.train.config.sections.run import (
    CheckpointConfig,
    LogConfig,
    RunConfig,
    StatisticsConfig,
)

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
