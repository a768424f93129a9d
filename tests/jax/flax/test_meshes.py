"""Flax models on meshes: placements of hooks, gathers in FP8, Explicit axes; and what scans over
layers save.
"""

import collections

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8ref import jax as fj
from fp8ref.jax import proof
from fp8ref.jax.distributed.sharding import Placement

B, T, D, F = 8, 16, 64, 128
NAMES, BATCH = ("data", "fsdp", "tensor"), ("data", "fsdp")
AUTO = jax.make_mesh((2, 2, 2), NAMES, axis_types=(AxisType.Auto,) * 3)
EXPLICIT = jax.make_mesh((2, 2, 2), NAMES)
WHOLE = {"reduce_grads": "accumulators", "reduce_outputs": "accumulators"}  # one device's bits
PLACES = {
    "up": Placement(m=BATCH, n=("tensor",), fsdp=("fsdp",), sequence=True, **WHOLE),
    "down": Placement(m=BATCH, k=("tensor",), fsdp=("fsdp",), sequence=True, **WHOLE),
}
OF_UP, OF_DOWN = P(None, ("tensor", "fsdp")), P("tensor", "fsdp")
X = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (B, T, D)), jnp.bfloat16)


def put(value, *spec, mesh=AUTO):
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def round_weights(tree):
    """Weights that are integers over 8, so that sums are exact."""
    return jax.tree.map(lambda v: jnp.round(v * 16) / 8, tree)


def same(mine, one):
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def gathered(lowered, least=0):
    """What is gathered, by layer: its dtypes, other than of scales."""
    found = collections.defaultdict(set)
    for c in proof.collectives(proof.read(lowered)):
        if (
            c.kind == "all_gather"
            and c.shape[-1] > 1
            and c.shape[-2:-1] != (1,)
            and np.prod(c.shape) >= least
        ):
            found[c.layer].add(c.dtype[:2])
    return dict(found)


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(F, use_bias=False, dtype=jnp.bfloat16, name="up")(x)
        return nn.Dense(D, use_bias=False, dtype=jnp.bfloat16, name="down")(nn.relu(h))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_linen_models_sequence_and_weights_are_gathered_in_fp8(recipe):  # P-6
    """Under plain jit, where without a placement XLA would gather the bfloat16."""
    one = fj.flax.convert(LinenMLP(), recipe, inputs=(X,))
    model = fj.flax.convert(LinenMLP(), recipe, inputs=(X,), placement=PLACES)
    variables = round_weights(one.init(jax.random.key(0), X))
    # init may run on one device
    same(model.init(jax.random.key(0), X), one.init(jax.random.key(0), X))

    def grads(model):
        return jax.jit(
            lambda v, x: jax.grad(lambda v, x: model.apply(v, x).astype(jnp.float32).sum(), (0, 1))(
                v, x
            )
        )

    params = variables["params"]
    cut = {
        "params": {
            "up": {"kernel": put(params["up"]["kernel"], *OF_UP)},
            "down": {"kernel": put(params["down"]["kernel"], *OF_DOWN)},
        }
    }
    x = put(X, BATCH, "tensor")
    same(grads(model)(cut, x), grads(one)(variables, X))
    assert gathered(grads(model).lower(cut, x)) == {"up": {"f8"}, "down": {"f8"}}


class MLP(nnx.Module):
    def __init__(self, rngs):
        how = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.up, self.down = nnx.Linear(D, F, **how), nnx.LinearGeneral(F, (4, D // 4), **how)

    def __call__(self, x):
        y = self.down(nnx.relu(self.up(x)))
        return y.reshape(*y.shape[:-2], -1)


@pytest.mark.grid(1)
@pytest.mark.parametrize("placement", [PLACES, PLACES.get], ids=["mapping", "function"])
def test_an_nnx_model_inside_shard_map(placement):  # P-6, P-9
    def split(**options):
        model = fj.flax.convert(MLP(nnx.Rngs(0)), "rowwise", **options)
        for layer in (model.up, model.down):
            layer.kernel.set_value(round_weights(layer.kernel.get_value()))
        return nnx.split(model)

    (plain, params), (graph, _) = split(), split(placement=placement)
    one = jax.jit(jax.grad(lambda s, x: nnx.merge(plain, s)(x).astype(jnp.float32).sum(), (0, 1)))
    specs = jax.tree.map(lambda v: OF_UP if v.shape == (D, F) else OF_DOWN, params)
    of_x = P(BATCH, "tensor")

    def mapped(params, x):
        return jax.shard_map(
            lambda s, x: nnx.merge(graph, s)(x), mesh=AUTO, in_specs=(specs, of_x), out_specs=of_x
        )(params, x)

    grads = jax.jit(jax.grad(lambda s, x: mapped(s, x).astype(jnp.float32).sum(), (0, 1)))
    cut = jax.tree.map(lambda v, spec: put(v, *spec), params, specs), put(X, *of_x)
    same(grads(*cut), one(params, X))
    # codes of two sets in one, and a bit an element
    assert gathered(grads.lower(*cut)) == {"up": {"f8"}, "down": {"f8", "ui"}}


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"upp": Placement()}, r"placement pattern 'upp' matches no FP8 linear of: down, up"),
        ({"up": ("data",)}, "^up: placement is a sharding.Placement or None; got a tuple"),
        (lambda name: name, "^down: placement is .*got a str"),
    ],
)
def test_placements_are_checked(placement, message):
    with pytest.raises(ValueError, match=message):
        fj.flax.convert(MLP(nnx.Rngs(0)), "rowwise", placement=placement)


class Block(nn.Module):
    dot: object = None

    @nn.compact
    def __call__(self, x, _):
        how = {"use_bias": False, "dtype": jnp.bfloat16, "dot_general_cls": self.dot}
        q, k, v = (nn.Dense(D, name=name, **how)(x) for name in "qkv")
        return x + nn.Dense(D, name="o", **how)(q * jax.nn.sigmoid(k) + v), None


class Stack(nn.Module):
    dot: object = None

    @nn.compact
    def __call__(self, x):
        return nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(
            self.dot, name="b"
        )(x, None)[0]


def saved_by_scan(recipe, mesh=None):
    """What the forward scan stacks for the backward one: how often each shape and type."""
    model = Stack(recipe and fj.flax.linen_dot_general(recipe))
    variables = Stack().init(jax.random.key(0), X)
    x = X
    if mesh is not None:
        variables, x = (
            jax.tree.map(lambda v: put(v, None, "fsdp", mesh=mesh), variables),
            put(X, BATCH, mesh=mesh),
        )
    grads = jax.grad(lambda v, x: (model.apply(v, x).astype(jnp.float32) ** 2).sum(), (0, 1))
    scan = next(
        eqn
        for eqn in jax.make_jaxpr(grads)(variables, x).jaxpr.eqns
        if eqn.primitive.name == "scan"
    )
    body = scan.params["jaxpr"]
    of_step = getattr(body, "jaxpr", body).outvars
    # the others are carried
    stacked = [
        out
        for out, one in zip(scan.outvars, of_step, strict=True)
        if out.aval.shape != one.aval.shape
    ]
    return collections.Counter((v.aval.shape, v.aval.dtype.name) for v in stacked)


@pytest.mark.grid(2)
@pytest.mark.parametrize("mesh", [None, EXPLICIT], ids=["one device", "explicit"])
@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "rowwise_with_gw_hp"])
def test_linears_that_read_one_input_save_it_once(recipe, mesh):
    """q, k and v, in an nn.scan without remat: as often as in bfloat16."""
    assert saved_by_scan(recipe, mesh) == saved_by_scan(None)


def test_tensorwise_linears_save_a_byte_for_each_reader():
    """Codes of q, k, v and o; the activations between are not the linears'.

    Compiled for a GPU, XLA keeps one of equal codes.
    """
    found, shape = saved_by_scan("tensorwise"), (3, B, T, D)
    assert found[shape, "float8_e4m3fn"] == 4
    # x, and o's input
    assert found[shape, "bfloat16"] == saved_by_scan(None)[shape, "bfloat16"] - 2


class Attention(nnx.Module):
    """As flax's examples/gemma: einsums for q, for k and v, and for the output."""

    def __init__(self, heads, rngs):
        how = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.q_einsum = nnx.Einsum("BTD,DNH->BTNH", (D, heads, D // heads), **how)
        self.kv_einsum = nnx.Einsum("BSD,CDKH->CBSKH", (2, D, heads, D // heads), **how)
        self.attn_vec_einsum = nnx.Einsum("BTNH,NHD->BTD", (heads, D // heads, D), **how)

    def __call__(self, x, out):
        q, (k, v) = self.q_einsum(x), self.kv_einsum(x)
        weights = nnx.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, k) * (D // 4) ** -0.5)
        return self.attn_vec_einsum(jnp.einsum("BNTS,BSNH->BTNH", weights, v), out_sharding=out)


class GemmaBlock(nnx.Module):
    def __init__(self, rngs):
        how = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        self.norms = nnx.List([nnx.RMSNorm(D, rngs=rngs) for _ in range(2)])
        self.attn = Attention(4, rngs)
        self.gate_proj, self.up_proj, self.down_proj = (
            nnx.Linear(D, F, **how),
            nnx.Linear(D, F, **how),
            nnx.Linear(F, D, **how),
        )

    def __call__(self, x, out):
        x = x + self.attn(self.norms[0](x).astype(x.dtype), out)
        h = self.norms[1](x).astype(x.dtype)
        return x + self.down_proj(nnx.gelu(self.gate_proj(h)) * self.up_proj(h), out_sharding=out)


class Gemma(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([GemmaBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(D, 32, rngs=rngs)

    def __call__(self, x, out=None):
        for block in self.blocks:
            x = block(x, out)
        return self.head(x.astype(jnp.float32))


SPECS = {  # of kernels, by the end of their path
    "q_einsum": P("fsdp", "tensor"),
    "kv_einsum": P(None, "fsdp", "tensor"),
    "attn_vec_einsum": P("tensor", None, "fsdp"),
    "gate_proj": P("fsdp", "tensor"),
    "up_proj": P("fsdp", "tensor"),
    "down_proj": P("tensor", "fsdp"),
}


def trained(recipe, mesh=None, steps=3):
    """Losses of a few steps, and what lowers another one: the step and its arguments."""
    model = fj.flax.convert(Gemma(nnx.Rngs(0)), recipe, filter_fqns=["head"])
    out = None if mesh is None else NamedSharding(mesh, P(BATCH))
    x, target = X, jnp.arange(B * T).reshape(B, T) % 32
    if mesh is not None:
        x, target = put(x, BATCH, mesh=mesh), put(target, BATCH, mesh=mesh)
        state = nnx.state(model)
        for path, variable in nnx.to_flat_state(state):
            spec = SPECS.get(path[-2], P()) if path[-1] == "kernel" else P()
            variable.set_value(
                jax.tree.map(lambda v, spec=spec: put(v, *spec, mesh=mesh), variable.get_value())
            )
        nnx.update(model, state)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    def loss_fn(model, x, target):
        return optax.softmax_cross_entropy_with_integer_labels(model(x, out), target).mean()

    @nnx.jit
    def step(model, optimizer, x, target):
        loss, grads, seen = fj.flax.value_and_grad(loss_fn)(model, x, target)
        optimizer.update(model, grads)
        fj.flax.update(model, seen)
        return loss

    losses = [float(step(model, optimizer, x, target)) for _ in range(steps)]
    return losses, (step, model, optimizer, x, target)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_transformer_trains_on_explicit_axes(recipe):  # P-20
    """Codes are one device's.

    Sums in another order move a number of bfloat16 by a step, 2^-8 of it, at most.
    """
    found, (step, *args) = trained(recipe, EXPLICIT)
    expected, _ = trained(recipe)
    assert found[-1] < found[0]
    np.testing.assert_allclose(found, expected, rtol=2.0**-8)
    lowered = step.lower(*args)
    assert sum(gemm.fp8 for gemm in proof.gemms(proof.read(lowered))) == 2 * 6 * 3
    moved = {
        layer: dtypes for layer, dtypes in gathered(lowered, least=D * D // 4).items() if layer
    }
    assert len(moved) == 2 * 6
    assert set.union(*moved.values()) == {"f8"}


def small(shape, e, seed):
    """Integers from -1 to 1 times 2^e, mostly 0, of which sums of products of a few layers are
    exact.
    """
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(-1, 2, shape) * (rng.random(shape) < 0.2) * 2.0**e, jnp.float32)


class Body(nn.Module):
    dot: object

    @nn.compact
    def __call__(self, x, _):
        how = {"use_bias": False, "dtype": jnp.bfloat16, "dot_general_cls": self.dot}
        return nn.Dense(D, name="down", **how)(nn.Dense(F, name="up", **how)(x)), None


class Rematerialized(nn.Module):
    dot: object

    @nn.compact
    def __call__(self, x):
        of = {"params": 0, fj.flax.STATE: 0, fj.flax.SEEN: 0}
        body = nn.scan(
            nn.remat(Body, prevent_cse=False),
            variable_axes=of,
            split_rngs={"params": True},
            length=2,
        )
        return body(self.dot, name="b")(x, None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_linens_scan_of_remat_on_explicit_axes(recipe):  # P-20
    model, x = (
        Rematerialized(fj.flax.linen_dot_general(recipe)),
        small((B, T, D), 0, 0).astype(jnp.bfloat16),
    )
    variables = model.init(jax.random.key(0), x)
    variables = {
        **variables,
        "params": jax.tree.map(lambda v: small(v.shape, 0, v.shape[1]), variables["params"]),
    }

    def loss(variables, x):
        y, updated = model.apply(variables, x, mutable=[fj.flax.SEEN])
        return y.astype(jnp.float32).sum(), updated

    step = jax.jit(lambda variables, x: fj.flax.value_and_grad(loss)(variables, x))
    specs = {"up": P(None, "fsdp"), "down": P(None, "data")}
    params = {
        name: {"kernel": put(of["kernel"], *specs[name], mesh=EXPLICIT)}
        for name, of in variables["params"]["b"].items()
    }
    with jax.set_mesh(EXPLICIT):
        found = step(
            {**jax.device_put(variables, NamedSharding(EXPLICIT, P())), "params": {"b": params}},
            put(x, BATCH, mesh=EXPLICIT),
        )
    same(found, step(variables, x))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_nnxs_scan_and_vmap_on_explicit_axes(recipe):  # P-20
    """A scan over stacked layers, and a vmap of them over examples."""

    class Stacked(nnx.Module):
        def __init__(self):
            kernels = jnp.stack([small((D, D), 0, seed) for seed in (1, 2)])
            self.layers = nnx.vmap(lambda kernel: self.layer(kernel))(kernels)

        def layer(self, kernel):
            made = nnx.Linear(
                D,
                D,
                use_bias=False,
                dtype=jnp.bfloat16,
                dot_general=fj.flax.nnx_dot_general(recipe),
                rngs=nnx.Rngs(0),
            )
            made.kernel.set_value(kernel)
            return made

        def __call__(self, x):
            scanned = nnx.scan(
                lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )(x, self.layers)
            return scanned + nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None), out_axes=0)(
                self.layers, x
            ).sum(0)

    def loss(model, x):
        return model(x).astype(jnp.float32).sum()

    step = nnx.jit(lambda model, x: fj.flax.value_and_grad(loss)(model, x))
    x, model = small((B, T, D), 0, 0).astype(jnp.bfloat16), Stacked()
    expected = step(model, x)
    state = nnx.state(model)
    place = lambda v: put(v, None, "fsdp", mesh=EXPLICIT) if v.ndim == 3 else put(v, mesh=EXPLICIT)  # noqa: E731
    nnx.update(model, jax.tree.map(place, state))
    with jax.set_mesh(EXPLICIT):
        same(step(model, put(x, BATCH, mesh=EXPLICIT)), expected)
