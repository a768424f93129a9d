"""Estimated memory of a device in training, from shapes: what each thing takes, and when.

Most of it is not needed throughout a step: logits are gone before the last layer's gradients are
there. So the most that is in use is looked for among ``MOMENTS``. The tests compare it with the
memory of XLA's programs for H200s, within 6.5 % of whole models and 20 % of two layers, and with
what PyTorch's operators keep alive on one device, within 2 %. Not counted: CUDA context and
libraries (about a GiB), fragmentation, buffers of collectives, workspaces of GEMMs.
"""

import math
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple, get_args

from fp8ref.estimate import activations, attention, kernels
from fp8ref.spec import llama
from fp8ref.train.config.config import Config
from fp8ref.train.config.device_shapes import at_rest, copied, in_fp8, sharded, used
from fp8ref.train.run import train_state
from fp8ref.train.run.train_state import FP8_BLOCK, FP8_SMALLEST

Moment = Literal["loss", "last layer", "first layer", "embedding", "update"]
"""A moment of a step: the backward pass of the loss, of the last layer, which comes first, of the
first layer, of the embedding table; the optimizer's update."""

MOMENTS: tuple[Moment, ...] = get_args(Moment)  # in the order of a step

BACKWARD, LAYERS, AFTER = MOMENTS[:4], MOMENTS[1:3], MOMENTS[2:]

OBSERVATION = 3 * 4
"""Bytes that a role's observation takes until the step's update: amax and two flags, float32."""

FOREACH = 4
"""Bytes a parameter of torch's AdamW update, of all at once: square roots of second moments."""


class Line(NamedTuple):
    """What something takes on a device: bytes, the formula, and when it is there."""

    size: int
    formula: str
    at: tuple[Moment, ...] = MOMENTS


def largest(config: Config, backend: str) -> str:
    """The recipe of a schedule that takes the most memory of a device; the first of equal ones."""
    return max(config.recipes, key=lambda recipe: most(lines(config, backend, recipe))[1])


def at_moments(memory_lines: Mapping[str, Line]) -> dict[Moment, int]:
    """Bytes that are in use at each moment."""
    sizes = dict.fromkeys(MOMENTS, 0)
    for line in memory_lines.values():
        for moment in line.at:
            sizes[moment] += line.size
    return sizes


def most(memory_lines: Mapping[str, Line]) -> tuple[Moment, int]:
    """(the moment that needs the most, its bytes); the first of equal ones."""
    return max(at_moments(memory_lines).items(), key=lambda item: item[1])


def lines(config: Config, backend: str, recipe: str | None = None) -> dict[str, Line]:
    """What a device holds in a step, by name, in one of the recipes; None: the ``largest``.

    States of delayed scaling are those of all recipes, since phases keep them (T-9).
    """
    fp8_states = Line(
        _states(config, backend), "scales, histories and observations of delayed scaling"
    )
    recipe = recipe or largest(config, backend)
    # In PyTorch phases of a schedule share one weight, and keep none in FP8.
    kept_in_fp8 = {}
    if backend == "jax" or len(config.recipes) == 1:
        kept_in_fp8 = copied(config.under(recipe), backend)
    config = config.under(recipe)
    sizes = piece_sizes(config, backend)
    state, masters = _state(config, sizes)
    scores = _scores(config, backend)
    if config.parallel.context > 1:
        scores["keys and values of all parts"] = Line(*attention.gathered_bytes(config), LAYERS)
    kept = activations.kept(config, backend)
    layer_kept = activations.layer_activations(config, backend)
    at = LAYERS if config.parallel.checkpointing != "none" else LAYERS[1:]
    memory_lines = {
        masters: state.pop(masters),
        **_gradients(config, backend, sizes),
        **state,
        "FP8 states": fp8_states,
        **_weights(config, backend, kept_in_fp8),
        **_codes(config, backend),
        "activations, kept": Line(*kept, MOMENTS[:2]),
        "activations of a layer": Line(*layer_kept, at),
        **scores,
        "logits": Line(*activations.logits(config, backend), MOMENTS[:1]),
    }
    if backend == "torch" and config.optimizer.kind == "adamw":
        update_bytes = FOREACH * sum(piece for piece, _ in sizes.values())
        memory_lines["update of all parameters"] = Line(
            update_bytes, f"{FOREACH} bytes a parameter; none under adamw_fused", MOMENTS[4:]
        )
    return memory_lines


def _scores(config: Config, backend: str) -> dict[str, Line]:
    """Attention's scores in memory: none of torch's, cuDNN's, or a kernel's on the chip."""
    keys, variant = config.parallel, config.attention_variant
    if keys.attention == "kernel":
        return {}
    if variant is not None:
        tile = attention.tile_bytes(config, variant, backend)
        return {"attention scores": Line(*tile, LAYERS)}
    if backend == "jax" and keys.attention != "cudnn":
        return {"attention scores": Line(*activations.scores(config), LAYERS)}
    return {}


def _state(config: Config, sizes: Mapping[str, tuple[int, int]]) -> tuple[dict[str, Line], str]:
    """(what is kept between steps, the name of the masters among it)."""
    kept: dict[str, int] = {}  # bytes by label
    for one in train_state.PER_PARAMETER:
        kept[one.label] = kept.get(one.label, 0) + sum(
            one.device_bytes(piece, config.optimizer, whole) for piece, whole in sizes.values()
        )
    (masters,) = (t.label for t in train_state.PER_PARAMETER if t.name == train_state.MASTERS)
    layout = config.optimizer.moment_layout
    masters_formula = "4 bytes a parameter of the device's piece"
    if layout is not None and layout.keeps_master:
        own, size = kept.pop(masters), layout.master.fmt.bits // 8
        masters_formula = (
            f"layout {layout.name}: {size} bytes a parameter of the device's piece (O-14)"
        )
        masters = f"weights, {layout.master.fmt.name} masters"
        kept[masters] = own
    formulas = {masters: masters_formula, "AdamW's moments": _moments_formula(config)}
    usual = "4 bytes a parameter"
    return {k: Line(size, formulas.get(k, usual)) for k, size in kept.items()}, masters


def _gradients(
    config: Config, backend: str, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, Line]:
    """Gradients of the device's pieces. Each layer's are there after its backward pass, those of
    the tables and the last norm at its end; a scan has room for all layers' from its beginning."""
    layer_elements = sum(piece for name, (piece, _) in sizes.items() if ".layers." in name)
    others = sum(piece for piece, _ in sizes.values()) - layer_elements
    parts = config.data.microbatches > 1
    if backend == "jax":
        at = MOMENTS[1:] if config.parallel.scan else AFTER
        narrow = "2 bytes a parameter, bf16"
        memory_lines = {
            "gradients of layers": Line(2 * layer_elements, narrow, at),
            "gradients of other weights": Line(2 * others, narrow, MOMENTS[4:]),
        }
        if parts:
            total = Line(sum_bytes(config, sizes), _sum_formula(config))
            memory_lines["gradients, sum over parts"] = total
        return memory_lines
    # Without FSDP2 autograd widens the gradients of bf16 copies last, all of them.
    widened = not sharded(config, backend) and not config.optimizer.keeps_masters
    wide, last = "4 bytes a parameter, float32", MOMENTS[3:] if widened else MOMENTS[4:]
    memory_lines = {
        "gradients of layers": Line(
            4 * layer_elements, wide, MOMENTS if parts else last if widened else AFTER
        ),
        "gradients of other weights": Line(4 * others, wide, MOMENTS if parts else last),
    }
    if widened:
        memory_lines["gradients of bf16 copies"] = Line(
            2 * (layer_elements + others), "2 bytes a parameter, until all are there", MOMENTS[2:3]
        )
    return memory_lines


def _sum_formula(config: Config) -> str:
    element_bytes = {"float32": 4, "bfloat16": 2}.get(config.parallel.accumulate_dtype)
    if element_bytes is None:
        return "1 byte of a linear's weight, in FP8, 4 of others"
    return f"{element_bytes} bytes a parameter, in {config.parallel.accumulate_dtype}"


def sum_bytes(config: Config, sizes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of the sums over microbatches of parameters of these pieces."""
    dtype = config.parallel.accumulate_dtype
    if dtype == "float8_e4m3fn":
        linears = {f"{name}.weight" for name in llama.linear_shapes(config.model)}
        return sum(piece * (1 if name in linears else 4) for name, (piece, _) in sizes.items())
    return (2 if dtype == "bfloat16" else 4) * sum(piece for piece, _ in sizes.values())


def piece_sizes(config: Config, backend: str) -> dict[str, tuple[int, int]]:
    """{parameter: (elements of a device's piece, of all)}."""
    shapes = llama.parameter_shapes(config.model).items()
    return {
        name: (math.prod(at_rest(name, shape, config, backend)), math.prod(shape))
        for name, shape in shapes
    }


def states(piece: int, whole: int, config: Config) -> int:
    """Bytes kept of a parameter's piece of so many elements: master and both moments."""
    tensors = train_state.PER_PARAMETER
    return sum(one.device_bytes(piece, config.optimizer, whole) for one in tensors)


def _moments_formula(config: Config) -> str:
    if config.optimizer.kind == "adamw_fp8":
        return (
            f"2 codes and 2 scales of {FP8_BLOCK}; float32 in pieces below {FP8_SMALLEST} or "
            f"no multiple of {FP8_BLOCK} (T-6)"
        )
    layout = config.optimizer.moment_layout
    if layout is not None:
        return (
            f"layout {layout.name}: {layout.bytes_per_parameter(1 << 24):.4g} bytes a "
            "parameter; scales are whole on every device (O-11)"
        )
    return "2 float32 a parameter"


def _states(config: Config, backend: str) -> int:
    """The saved states of delayed scaling, and an observation for each role."""
    tensors = train_state.fp8_states(config, backend)
    roles = sum(name.endswith(".amax_history") for name in tensors)
    return sum(tensor.nbytes for tensor in tensors.values()) + OBSERVATION * roles


def _weights(config: Config, backend: str, kept: Collection[str]) -> dict[str, Line]:
    """Copies of the device's own pieces that it computes with, and what it gathers of others. kept:
    linears whose weights are kept in FP8.
    """
    masters_apart = config.optimizer.keeps_masters
    table = config.model.vocab_size * config.model.hidden_size
    memory_lines: dict[str, Line] = {}
    if backend == "jax" or masters_apart or not sharded(config, backend):
        # copies of masters are made in each step
        memory_lines["weights in use"] = Line(
            *_own(config, backend, kept), MOMENTS if masters_apart else BACKWARD
        )
    if sharded(config, backend):
        return memory_lines | _gathered(config, backend, table)
    if backend == "jax":
        memory_lines["gradient of the last linear"] = Line(
            2 * table, "2 bytes an element: bf16", MOMENTS[:1]
        )
    return memory_lines


def _codes(config: Config, backend: str) -> dict[str, Line]:
    """Codes of weights that Triton kernels have cast, which the backward pass takes; JAX's, unless
    layers are scanned, are weights in use."""
    if backend == "jax" and not config.parallel.scan:
        return {}
    sizes = {
        d.path: math.prod(used(d.path, d.shape, config))
        * kernels.code_bytes(d.recipe, config, backend)
        for d in config.decisions()
        if d.experts is None
    }
    if not any(sizes.values()):
        return {}
    formula = "1 byte an element of each order, written by Triton kernels"
    return {"codes of weights": Line(sum(sizes.values()), formula, BACKWARD)}


def _gathered(config: Config, backend: str, table: int) -> dict[str, Line]:
    """What a device gathers of weights, and their gradients; table: elements of the embedding."""
    layer, codes, weight = _largest_layer(config, backend)
    if config.parallel.compile == "model":
        blocks = config.model.num_hidden_layers
        whole = 6 * (blocks * layer + 2 * table)
        summed = "6 bytes a parameter: bf16, and float32 to be summed"
        return {
            "weights, gathered": Line(blocks * codes + 4 * table, "the whole model", BACKWARD),
            "gradients, whole": Line(whole, summed, MOMENTS[2:4]),
        }
    at_once = weight if backend == "jax" and not config.parallel.scan else layer
    largest_part = "weight" if at_once == weight else "layer"
    summed = f"6 bytes an element of the largest {largest_part}: bf16, and float32 to be summed"
    # FSDP2 frees a layer before it reduces its gradients, and has gathered the next one.
    gathers = LAYERS if backend == "jax" else LAYERS[:1]
    memory_lines = {
        "weights of a layer, gathered": Line(
            codes, "1 byte an element where FP8 is gathered, else 2", gathers
        ),
        "gradients, whole": Line(6 * at_once, summed, LAYERS),
    }
    last_linear = "2 bytes an element, of the weight and its gradient"
    if backend == "jax":
        # the weight in another order, or its gradient
        last_bytes = 2 if config.parallel.loss == "chunked" else 4
        tables = "4 bytes an element of the embedding and the last linear, float32"
        return memory_lines | {
            "last linear, gathered": Line(last_bytes * table, last_linear, MOMENTS[:1]),
            "gradients of the tables": Line(8 * table, tables, MOMENTS[3:4]),
        }
    element_bytes = 2 if config.optimizer.keeps_masters else 4
    gradient = "8 bytes an element: float32, and again to be summed"
    return memory_lines | {
        "last linear, gathered": Line(4 * table, last_linear, MOMENTS[:3]),
        "embedding table, gathered": Line(
            element_bytes * table, f"{element_bytes} bytes an element", BACKWARD
        ),
        "gradient of the embedding table": Line(8 * table, gradient, MOMENTS[3:4]),
    }


def _largest_layer(config: Config, backend: str) -> tuple[int, int, int]:
    """(elements, bytes as gathered, elements of the largest weight) of the layer with the most."""
    elements: dict[str, int] = {}
    gathered: dict[str, int] = {}
    weights = [0]
    for decision in config.decisions():
        if "layers" not in decision.path:
            continue
        block = ".".join(decision.path.split(".")[:3])
        own = (decision.experts or 1) // (config.parallel.expert if decision.experts else 1)
        size = math.prod(used(decision.path, decision.shape, config)) * own
        codes = decision.experts is None and in_fp8(decision.recipe, config, backend)
        elements[block] = elements.get(block, 0) + size
        gathered[block] = gathered.get(block, 0) + size * (1 if codes else 2)
        weights.append(size)
    most = max(elements.values(), default=0), max(gathered.values(), default=0)
    return *most, max(weights)


def _own(config: Config, backend: str, kept: Collection[str]) -> tuple[int, str]:
    """(bytes, formula) of what a device computes with of its own pieces, beside the masters."""
    shapes = llama.parameter_shapes(config.model)
    pieces = {
        name: math.prod(at_rest(name, shape, config, backend)) for name, shape in shapes.items()
    }
    if not config.optimizer.keeps_masters:
        cut = sharded(config, backend)
        size = 2 * sum(size for name, size in pieces.items() if name != llama.EMBEDDING)
        if backend == "jax" and not cut and not config.parallel.scan:
            # XLA quantizes from the masters
            in_codes = (d for d in config.decisions() if d.fp8 and d.experts is None)
            size -= sum(math.prod(d.shape) for d in in_codes if not d.recipe.in_blocks)
            beside_codes = "bf16 copies of others but the embedding table"
            return size, f"codes of weights in FP8, and {beside_codes}"
        what = "the pieces" if cut else "all but the embedding table"
        return size, f"bf16 copies of {what}"
    # FSDP2 gathers from shards that stay bf16
    beside = 2 if backend == "torch" and sharded(config, backend) else 0
    linears = {f"{name}.weight" for name in kept}
    size = sum(n * (1 + beside if name in linears else 2) for name, n in pieces.items())
    if not kept:
        return size, "bf16 weights"
    return size, f"{1 + beside} bytes of each weight in FP8 (O-16), 2 of others in bf16"
