"""Faults of delayed scaling: a state with observe(amax), update() and scale; and of the collectives
that give ranks one amax."""

import dataclasses

import numpy as np
from museum import ask
from museum.arithmetic import F
from museum.exhibit import Exhibit

from fp8ref.spec.delayed import DELAYED

MAX = float(np.finfo(F).max)


class Scaling:
    """Delayed scaling to e4m3: the scale of the next step is 448 / the largest of 16 amaxes."""

    length = 16

    def __init__(self):
        self.history, self.seen, self.scale = [F(0)] * self.length, [], F(1)

    def observe(self, amax):
        self.seen.append(amax)

    def update(self):
        if self.seen and np.isfinite(self.seen).all():
            self.record(max(self.seen))
        self.seen = []

    def record(self, amax):
        """Enter a step's amax, and make the next scale."""
        self.history = [amax, *self.history[:-1]]
        self.rescale(max(self.history))

    def rescale(self, amax):
        if amax:
            self.scale = F(min(448 / float(amax), MAX))


class RollingUnused(Scaling):
    """The history is rolled in steps that recorded nothing: zeros push real values out."""

    def update(self):
        if not self.seen:
            self.record(F(0))
        super().update()


class LastMicrobatch(Scaling):
    """Accumulation keeps the last microbatch's amax."""

    def observe(self, amax):
        self.seen = [amax]


class MostRecent(Scaling):
    """The most recent amax makes the scale."""

    length = 1


class ZeroedFirst(MostRecent):
    """Place 0 is zeroed before the scale is made from it."""

    def record(self, amax):
        self.history[0] = F(0)
        self.rescale(self.history[0])


class OldMemory(Scaling):
    """The history was reallocated; amaxes are recorded in the old one."""

    def __init__(self):
        super().__init__()
        self.old = list(self.history)

    def record(self, amax):
        self.old = [amax, *self.old[:-1]]
        self.rescale(max(self.history))


class NeverUpdated(Scaling):
    """The update is never called: an enum was compared with a string."""

    def update(self):
        self.seen = []


class NeverReset(Scaling):
    """A step's amax is never reset: each is the largest of all time."""

    def __init__(self):
        super().__init__()
        self.largest = F(0)

    def record(self, amax):
        self.largest = max(self.largest, amax)
        super().record(self.largest)


def own_amax(shards):
    """Each rank has the amax of its own shard."""
    return [np.abs(shard).max(initial=0) for shard in shards]


def largest_amax(shards):
    """The largest of all ranks; a NaN stays."""
    return [np.max(own_amax(shards))] * len(shards)


TE = "https://github.com/NVIDIA/TransformerEngine/"

EXHIBITS = (
    Exhibit(
        name="te-825",
        link=TE + "pull/825",
        library="Transformer Engine",
        year=2024,
        title="The history is rolled for modules that did not run",
        fault=RollingUnused,
        twin=Scaling,
        ask=ask.delayed(),
        named="no rule explains a step without use",
    ),
    Exhibit(
        name="marin-7659",
        link="https://github.com/marin-community/marin/issues/7659",
        library="Levanter, Haliax",
        year=2026,
        title="Gradient accumulation keeps the last microbatch's amax",
        fault=LastMicrobatch,
        twin=Scaling,
        ask=ask.delayed(),
        named="no rule explains several uses in a step",
    ),
    Exhibit(
        name="te-65",
        link=TE + "pull/65",
        library="Transformer Engine",
        year=2023,
        title="With 'most_recent' the amax is zeroed before it is used",
        fault=ZeroedFirst,
        twin=MostRecent,
        ask=ask.delayed(dataclasses.replace(DELAYED["delayed"], history_length=1)),
        named="no amax changes its scale",
    ),
    Exhibit(
        name="te-2044",
        link=TE + "pull/2044",
        library="Transformer Engine",
        year=2025,
        title="A longer history is allocated, and kernels go on writing to the old one",
        fault=OldMemory,
        twin=Scaling,
        ask=ask.delayed(),
        named="no amax changes its scale",
    ),
    Exhibit(
        name="torchtitan-698",
        link="https://github.com/pytorch/torchtitan/pull/698",
        library="torchtitan",
        year=2024,
        title="The update is never called",
        fault=NeverUpdated,
        twin=Scaling,
        ask=ask.delayed(),
        named="no amax changes its scale",
    ),
    Exhibit(
        name="ms-amp-17",
        link="https://github.com/Azure/MS-AMP/pull/17",
        library="MS-AMP",
        year=2023,
        title="A step's amax is never reset",
        fault=NeverReset,
        twin=Scaling,
        ask=ask.delayed(),
        named="an amax is never forgotten",
    ),
    Exhibit(
        name="te-74",
        link=TE + "pull/74",
        library="Transformer Engine",
        year=2023,
        title="Ranks that gather FP8 tensors do not share the amax",
        fault=own_amax,
        twin=largest_amax,
        ask=ask.sharded(),
        named="each rank has the amax of its own shard",
    ),
)
