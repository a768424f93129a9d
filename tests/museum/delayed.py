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


class Saved(Scaling):
    """A state that a checkpoint saves and loads."""

    def save(self):
        return {"history": list(self.history), "scale": self.scale}

    def load(self, saved):
        self.history, self.scale = list(saved["history"]), saved["scale"]


class SavedReferences(Saved):
    """The history and the scale are changed in place, and are saved without a copy."""

    def __init__(self):
        super().__init__()
        self.history, self.scale = np.array(self.history, F), np.ones(1, F)

    def record(self, amax):
        self.history[1:] = self.history[:-1].copy()
        self.history[0] = amax
        self.rescale(self.history.max())

    def rescale(self, amax):
        if amax:
            self.scale[0] = F(min(448 / float(amax), MAX))

    def save(self):
        return {"history": self.history, "scale": self.scale}

    def load(self, saved):
        self.history, self.scale = saved["history"], saved["scale"]


class SavedCopies(SavedReferences):
    """The same with copies."""

    def save(self):
        return {key: array.copy() for key, array in super().save().items()}

    def load(self, saved):
        super().load({key: array.copy() for key, array in saved.items()})


class ScaleAlone(Saved):
    """A checkpoint restores the scale, and not the history."""

    def load(self, saved):
        self.scale = saved["scale"]


class Clipped(Scaling):
    """The amaxes are among the gradients, and are clipped with them."""

    def record(self, amax):
        super().record(min(amax, F(1)))


def own_amax(shards):
    """Each rank has the amax of its own shard."""
    return [np.abs(shard).max(initial=0) for shard in shards]


def pairs_of_ranks(shards):
    """The amax is reduced over groups of two ranks."""
    own = own_amax(shards)
    return [np.max(own[i // 2 * 2 :][:2]) for i in range(len(own))]


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
    Exhibit(
        name="te-1723",
        link=TE + "pull/1723",
        library="Transformer Engine",
        year=2025,
        title="What is saved for a recomputation is a reference to the live state",
        fault=SavedReferences,
        twin=SavedCopies,
        ask=ask.delayed(),
        unnamed="after 1 step: save; amax 1; load: got 448 (0x43E00000), expected 1 (0x3F800000) (H-13)",
    ),
    Exhibit(
        name="megatron-bridge-1730",
        link="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1730",
        library="Megatron-Bridge",
        year=2026,
        title="A checkpoint does not restore the history",
        fault=ScaleAlone,
        twin=Saved,
        ask=ask.delayed(),
        unnamed="after 2 steps: amax 2; save; load; amax 1: got 448 (0x43E00000), expected 224 (0x43600000) (H-13)",
    ),
    Exhibit(
        name="maxtext-672",
        link="https://github.com/AI-Hypercomputer/maxtext/pull/672",
        library="MaxText",
        year=2024,
        title="Gradient clipping clips the amaxes",
        fault=Clipped,
        twin=Scaling,
        ask=ask.delayed(),
        named="an amax above 1 counts as 1",
    ),
    Exhibit(
        name="te-852",
        link=TE + "pull/852",
        library="Transformer Engine",
        year=2024,
        title="The amax is reduced over another group of ranks",
        fault=pairs_of_ranks,
        twin=largest_amax,
        ask=ask.sharded(),
        named="pairs of ranks have the amax of the pair, not of all",
    ),
)
