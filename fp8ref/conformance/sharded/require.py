"""Require that a collective gives every rank the amax or scale of the whole tensor.

require_sharded(my_sync)        # list of shards -> an amax for each rank
"""

from collections.abc import Callable, Collection
from typing import Any

from fp8ref import policy as policies
from fp8ref.conformance.kit import difficulty as kit
from fp8ref.conformance.kit.subject import FRAMEWORKS
from fp8ref.conformance.sharded.comparison import Collective, Departure, departure
from fp8ref.conformance.sharded.inputs import DIFFICULTIES, drawn, fixed
from fp8ref.formats import E4M3FN
from fp8ref.policy import ScalePolicy
from fp8ref.shared.errors import one_of


def require_sharded(
    collective: Callable[[list], Any] | Collective,
    policy: str | ScalePolicy = "torchao",
    *,
    made: str = "amax",
    axis: int = 0,
    microbatches: bool = False,
    without: Collection[str] = (),
    examples: int = 25,
) -> None:
    """Require that every rank gets the whole tensor's value, for any cut of any tensor, else raise
    an AssertionError (spec P-27).

    collective    (shards) -> a value for each rank, in their order; or a ``Collective``, which has
                  a fmt and a framework too, and its own policy, made, axis and microbatches.
    policy        makes the scale to e4m3fn, where ``made`` is ``scale`` or ``scale_inv``.
    made          what it gives: ``amax``, ``scale`` or ``scale_inv``.
    axis          the axis that is cut, 0 or 1.
    microbatches  whether a rank's entry is a list of arrays, its microbatches, and no single array.
    without       keys of ``inputs.DIFFICULTIES`` that are left out.
    examples      random cases of each difficulty, beside fixed ones.

    Shapes:   1 to 4 shards float32 [rows, columns] of one tensor, uneven and empty ones included;
              a value is one number.
    Specials: NaN and infinities on any rank; all NaNs count as equal. A tensor that is empty as a
              whole is not given (S-7).
    Raises:   ValueError: an unknown policy or word, or a collective that is no function.
    Source:   spec P-2, P-3, P-27, H-4.
    """
    if isinstance(collective, Collective):
        if (policy, made, axis, microbatches) != ("torchao", "amax", 0, False):
            raise ValueError(
                "a Collective has its own policy, made, axis and microbatches; got others beside "
                "it. Set them in it."
            )
    elif not callable(collective):
        raise ValueError(
            f"a collective is a function of a list of shards; got {type(collective).__name__}."
        )
    else:
        collective = Collective(
            function=collective,
            policy=policies.by_name(policy),
            fmt=E4M3FN,
            made=made,
            axis=axis,
            microbatches=microbatches,
        )
    deviations = departures(collective, without=without, examples=examples)
    if deviations:
        name = getattr(collective.function, "__name__", "the collective")
        title = f"{name} is not the {collective.made} of the whole tensor:"
        raise AssertionError("\n".join([title, *(f"  {one}" for one in deviations)]))


def departures(
    collective: Collective, *, without: Collection[str] = (), examples: int = 25
) -> list[Departure]:
    """The simplest departure of each difficulty. Where equal shards of ordinary numbers depart,
    that one alone: it would show in all others.

    Raises:   ValueError: an unknown word or axis; ``ordinary`` cannot be left out.
    """
    kit.check_without(without, DIFFICULTIES)
    words = {"made": ("amax", "scale", "scale_inv"), "axis": (0, 1)}
    words["framework"] = tuple(FRAMEWORKS)
    for key, allowed in words.items():
        one_of(key, getattr(collective, key), allowed)
    impossible = () if collective.microbatches else ("microbatches",)
    return kit.departures(
        [difficulty for difficulty in DIFFICULTIES if difficulty not in (*without, *impossible)],
        lambda d: departure(collective, d, [*fixed(d), *drawn(d, examples)]),
    )
