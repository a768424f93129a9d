"""Simulated hardware of a run: an accumulation plan by name, or of a file (spec G-20)."""

from pathlib import Path
from typing import TYPE_CHECKING

from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.granularity import by_name as granularity_of
from fp8ref.train.config.config import Config

if TYPE_CHECKING:
    from fp8ref.sim.gemm.hardware import Hardware


def of(config: Config, backend: str | None = None) -> "Hardware | None":
    """The simulated hardware of numerics.accumulate; None if the framework's own GEMMs run.

    backend   the trainer's, whose limits are checked too; None: only those of both.
    Raises:   ConfigError: an unknown name; an incomplete plan; a plan that no GEMM here can use.
    """
    if not config.numerics.simulates:
        return None
    name = config.numerics.accumulate
    assert name is not None
    simulated = by_name(name)
    decisions = [d for recipe in config.recipes for d in config.under(recipe).decisions()]
    specs = [spec for d in decisions for spec in d.recipe.gemms.values() if spec.fp8]
    if not specs and not config.attention_in_fp8:
        raise ConfigError(
            f"numerics.accumulate {name!r} simulates FP8 GEMMs; recipe "
            f"{', '.join(config.recipes)!r} has none. Leave it out, or use recipe 'tensorwise'."
        )
    casts = [cast for spec in specs for cast in (spec.a, spec.b) if cast is not None]
    if unknown := sorted({cast.fmt.name for cast in casts} - {"e4m3fn", "e5m2"}):
        raise ConfigError(
            f"numerics.accumulate {name!r}: tensor cores multiply e4m3fn and e5m2; the recipe "
            f"has {', '.join(unknown)}."
        )
    epilogue = simulated.epilogue
    if epilogue is not None and config.attention_in_fp8:
        raise ConfigError(
            f"numerics.accumulate {name!r}: its epilogue {epilogue.name!r} scales and rounds "
            "GEMMs of linears, and attention scales the sums of numerics.attention "
            f"{config.numerics.attention!r} itself. Use a plan by name."
        )
    if (
        epilogue is not None
        and epilogue.round_first
        and any(granularity_of(cast.granularity).reduced is not None for cast in casts)
    ):
        raise ConfigError(
            f"numerics.accumulate {name!r}: its epilogue {epilogue.name!r} rounds the sum over "
            f"all of K before it is scaled, and recipe {', '.join(config.recipes)!r} scales "
            "blocks of K. Use recipe 'rowwise', or a plan by name."
        )
    if epilogue is not None and backend == "jax" and config.parallel.devices > 1:
        raise ConfigError(
            f"numerics.accumulate {name!r}: on a mesh sums over devices are scaled by JAX "
            f"(G-21), and this plan has an epilogue of its own, {epilogue.name!r}. Use one "
            "device, or a plan by name."
        )
    return simulated


def to_manifest(config: Config) -> dict | None:
    """The accumulation plan as JSON for a run's manifest; None without simulated hardware."""
    simulated = of(config)
    return None if simulated is None else simulated.to_dict()


def by_name(name: str) -> "Hardware":
    """The simulated hardware of that name, or from that file if the name ends in .json.

    Raises:   ConfigError: an unknown name; a file that is unreadable or has no complete plan.
    """
    from fp8ref.sim.gemm import hardware

    if name.endswith(".json"):
        return _probed(Path(name))
    try:
        return hardware.by_name(name)
    except ValueError:
        names = ", ".join(("native", *hardware.HARDWARE))
        raise ConfigError(
            f"numerics.accumulate is one of {names}, or the .json of a plan that fp8ref probe "
            f"wrote; got {name!r}."
        ) from None


def _probed(path: Path) -> "Hardware":
    from fp8ref.conformance.gemm import plans
    from fp8ref.sim.gemm import hardware

    try:
        probe = files.read_object(path)
        plan = probe["plan"]
        accumulate = plans.accumulation(plan, evidence=f"a probe of {probe['subject']}")
        return hardware.probed(accumulate, plans.epilogue(plan))
    except OSError as error:
        raise ConfigError(
            f"numerics.accumulate: {path} cannot be read ({error.strerror}). Name what fp8ref "
            "probe SUBJECT --json FILE wrote."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # other JSON than a probe's
        is_value = isinstance(error, ValueError)
        why = str(error).rstrip(".") if is_value else "it has no plan"
        raise ConfigError(
            f"numerics.accumulate: {path} holds no complete plan of a GEMM ({why}). Name what "
            "fp8ref probe SUBJECT --json FILE wrote."
        ) from error
