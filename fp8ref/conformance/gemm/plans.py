"""What a probe finds, as JSON and back: an accumulation and an epilogue that the simulator runs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fp8ref.conformance.gemm import epilogues
from fp8ref.epilogue import Epilogue
from fp8ref.sim.accumulate import Accumulation
from fp8ref.sim.tensor_core import TensorCore

UNIT = tuple(f.name for f in dataclasses.fields(TensorCore) if f.name not in ("name", "evidence"))
PLAN = tuple(f.name for f in dataclasses.fields(Accumulation) if f.name not in ("name", "unit"))


def of_accumulation(accumulate: str | Accumulation) -> dict[str, Any]:
    """``accumulate`` is the name of one that is no tensor core's, else null; the other keys are those of the unit and the plan, or null."""
    if isinstance(accumulate, str):
        return {"accumulate": accumulate} | dict.fromkeys(UNIT + PLAN)
    return {"accumulate": None} | {key: getattr(accumulate.unit, key) for key in UNIT} | {key: getattr(accumulate, key) for key in PLAN}


def accumulation(plan: Mapping[str, Any], *, evidence: str) -> str | Accumulation:
    """The accumulation of a plan that a probe wrote.

    Raises:   ValueError: keys that are missing, or null because the probe could not tell; values that no tensor core has.
    """
    if plan.get("accumulate") is not None:
        return str(plan["accumulate"])
    missing = [key for key in (*UNIT, *PLAN) if key not in plan or (plan[key] is None and key != "promotion")]
    if missing:
        raise ValueError(
            f"a plan has all of its keys; {', '.join(missing)} could not be told or {'is' if len(missing) == 1 else 'are'} missing. Probe again."
        )
    unit = TensorCore(name="probed", evidence=evidence, **{key: plan[key] for key in UNIT})
    return Accumulation(name="probed", unit=unit, **{key: plan[key] for key in PLAN})


def epilogue(plan: Mapping[str, Any]) -> Epilogue:
    """The epilogue of a plan that a probe wrote.

    Raises:   ValueError: none that a probe knows.
    """
    known = {e.name: e for e in epilogues.everyone()}
    if str(plan.get("epilogue")) not in known:
        raise ValueError(
            f"a plan's epilogue is one that a probe names, such as {', '.join(list(known)[:3])}; got {plan.get('epilogue')!r}. Probe again."
        )
    return known[plan["epilogue"]]
