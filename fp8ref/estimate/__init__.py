"""What a config would take on a GPU: memory, GEMMs, traffic and time, from shapes and rates, before anything is built."""

from fp8ref import extras

extras.require("train", "fp8ref.estimate", "pydantic", "rich")
