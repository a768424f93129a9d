"""Attention in PyTorch: what it refuses, compiles to, keeps and launches.

Its bits are in parity/test_attention_torch.py.
"""

import dataclasses

import numpy as np
import pytest
import torch
from helpers.attention.attention_cases import call_options
from helpers.processes.compiled import said
from helpers.processes.ranks import run
from helpers.processes.syncs import Ops, Syncs
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8ref.formats import E4M3FN
from fp8ref.sim.gemm import hardware as sim_hardware
from fp8ref.spec import delayed as delayed_configs
from fp8ref.spec.attention.call import Call
from fp8ref.spec.attention.variants import ARITHMETIC, VARIANTS, Mask
from fp8ref.torch import delayed
from fp8ref.torch.attention import RankCall, RoleScales, attention
from fp8ref.torch.gemm import hardware

CAUSAL = Mask(causal=True)
WITH_GRADIENTS = [name for name, variant in VARIANTS.items() if variant.backward is not None]


def inputs(
    b=1,
    h=4,
    heads=2,
    tq=70,
    tk=150,
    d=64,
    *,
    dtype=torch.float32,
    requires_grad=False,
    device="cpu",
):
    made = torch.Generator().manual_seed(0)
    shapes = ((b, h, tq, d), (b, heads, tk, d), (b, heads, tk, d))
    return [
        torch.randn(s, generator=made).to(device, dtype).requires_grad_(requires_grad)
        for s in shapes
    ]


# ---- apply, forward, backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_apply_is_forward_and_backward(name, dtype):
    documents = torch.zeros(1, 70, dtype=torch.int32), (torch.arange(150)[None] > 100).int()
    leaves = inputs(dtype=dtype, requires_grad=name in WITH_GRADIENTS)
    call = Call(variant=name, mask=Mask(window=(50, 3)), scale=0.3)
    o = attention.apply(*leaves, variant=call, documents=documents)
    result = attention.forward(*leaves, variant=call, documents=documents)
    assert o.dtype == dtype
    torch.testing.assert_close(o, result.o.to(dtype), rtol=0, atol=0)
    assert o.any()
    if name in WITH_GRADIENTS:
        do = torch.randn_like(o)
        o.backward(do)
        found = attention.backward(do, *leaves, result, variant=call)
        for leaf, one in zip(leaves, (found.dq, found.dk, found.dv), strict=True):
            torch.testing.assert_close(leaf.grad, one.to(dtype), rtol=0, atol=0)
            assert leaf.grad.any()


def test_a_row_that_sees_no_key_is_zero_and_has_no_gradient():  # A-10, A-11
    documents = torch.zeros(1, 70, dtype=torch.long), torch.zeros(1, 150, dtype=torch.long)
    documents[0][0, 7] = 3
    for name in WITH_GRADIENTS:
        q, k, v = inputs(requires_grad=True)
        o = attention.apply(q, k, v, variant=name, documents=documents)
        o.sum().backward()
        result = attention.forward(q, k, v, variant=name, documents=documents)
        assert not o[:, :, 7].any()
        assert not q.grad[:, :, 7].any()
        assert q.grad.isfinite().all()
        assert torch.equal(result.lse.isneginf(), torch.arange(70).eq(7).expand(1, 4, 70))


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ("exact", "bf16")])
def test_nan_reaches_all_that_shares_its_scale(name):
    """Nothing is refused, for the host would wait; nothing finite comes of it either."""
    for bad in (torch.nan, torch.inf):
        q, k, v = inputs(b=2)
        k[0, 0, 3, 5] = bad
        o = attention.forward(q, k, v, variant=name).o
        assert o[0, :2].isnan().all()
        if VARIANTS[name].granularity != "tensor":
            assert o[0, 2:].isfinite().all()
            assert o[1].isfinite().all()


def test_other_heads_and_scales_by_tensor_and_head():  # A-2
    """Variants are data: cuDNN's with a scale for each head, and with the orders of sums of Hopper
    and Blackwell.
    """
    leaves = inputs(requires_grad=True)
    for changed in ({"granularity": "head"}, {"sum_order": "packed"}, {"sum_order": "quad"}):
        o = attention.apply(*leaves, variant=dataclasses.replace(VARIANTS["cudnn"], **changed))
        exact = attention.apply(*leaves, variant="exact")
        # e4m3 rounds q, k, v, P and o by 2^-4 at most, and by far less in the mean
        assert (o - exact).norm() < 0.08 * exact.norm()
        o.sum().backward()


def test_autocast_changes_nothing():
    leaves = inputs(requires_grad=True)
    for name in WITH_GRADIENTS:
        plain = attention.apply(*leaves, variant=name)
        with torch.autocast("cpu", torch.bfloat16):
            cast, result = (
                attention.apply(*leaves, variant=name),
                attention.forward(*leaves, variant=name),
            )
        assert torch.equal(cast, plain)
        assert torch.equal(result.o, plain)


# ---- What is refused


def called(function, *tensors, **options):
    return function(*tensors, **call_options(**options))


def test_what_is_refused():
    q, k, v = inputs()
    for message, change in {
        "variant is a Variant or one of": {"variant": "fa5"},
        "mask is a Mask": {"mask": "causal"},
        "arithmetic is one of fast, stated; got 'exact'": {"arithmetic": "exact"},
        "softmax scale is positive and finite; got 0": {"scale": 0.0},
        "has no rotation": {"seed": 3},
        "takes scales for no role; got 'q'": {"scales": {"q": torch.ones(())}, "variant": "bf16"},
        "takes scales for q, k, v; got 'do'": {"scales": {"do": torch.ones(())}, "variant": "fa3"},
        r"float32 [1, 2, 1, 1]; got torch.float32 []": {
            "scales": {"q": torch.ones(())},
            "variant": "fa3",
        },
        "softmax scale is a number; got Parameter. Pass a float": {
            "scale": torch.nn.Parameter(torch.ones(()))
        },
        "softcap is a number; got Parameter. Pass a float": {
            "softcap": torch.nn.Parameter(torch.ones(()))
        },
        "a passed scale of q is float32": {"scales": {"q": 2.0}},
        "documents are a tensor [B, T] of integers, or a tuple of two; got Tensor and NoneType": {
            "documents": (torch.zeros(1, 70, dtype=torch.long), None)
        },
        "tuple of two; got list": {"documents": [[0] * 70]},
        "got 4. Use promotion=1, or fp8ref.sim for 4": {
            "variant": dataclasses.replace(VARIANTS["fa3"], promotion=4)
        },
        "documents are integers: [1, 70] for queries": {
            "documents": torch.zeros(1, 70, dtype=torch.long)
        },
    }.items():
        options = {"variant": "cudnn"} | change
        for function in (attention.forward, attention.apply):
            assert message in said(called, function, q, k, v, **options), message
    for message, tensors in {
        "q is non-empty float32, float16 or bfloat16 [B, heads, T, D]; got torch.float32 (": (
            q[0],
            k,
            v,
        ),
        "[B, heads, T, D]; got torch.float64": (q.double(), k, v),
        "k is non-empty float32, float16 or bfloat16 [B, heads, T, D]": (q, k[:, :, :0], v),
        "with Hkv dividing H": (q[:, :3], k, v),
        "on one device; got cpu, meta and cpu": (q, k.to("meta"), v),
        "at most 256 features; got 272": inputs(d=272),
    }.items():
        assert message in said(attention.apply, *tensors, variant="cudnn"), message
    assert "q is a tensor; got ndarray" in said(attention.apply, q.numpy(), k, v, variant="cudnn")
    assert "sinks is a tensor; got list" in said(
        attention.apply, q, k, v, variant="cudnn", sinks=[1.0] * 4
    )
    assert "is a power of two; got 96" in said(attention.apply, *inputs(d=96), variant="fa3_paper")
    assert "seed is an integer in [0, 2^64); got -1" in said(
        called, attention.apply, q, k, v, variant="fa3_paper", seed=-1
    )
    assert "features divisible by 32; got 48" in said(
        attention.apply, *inputs(d=48), variant="mxfp8"
    )
    assert "variant 'bf16' has none" in said(
        called, attention.forward, q, k, v, variant="bf16", keep_p=True
    )
    assert "mask is a Mask" in said(attention.apply, q, k, v, variant="cudnn", mask="causal")
    assert "a Call has its mask" in said(
        attention.apply, q, k, v, variant=Call(variant="cudnn"), mask=CAUSAL
    )
    assert "apply returns o alone; got keep_p=True" in said(
        called, attention.apply, q, k, v, variant="cudnn", keep_p=True
    )
    assert "got keep_ds=True. Leave it out, or use forward and backward." in said(
        called, attention.apply, q, k, v, variant="cudnn", keep_ds=True
    )
    assert "take whole sequences; got context='0'" in said(
        attention.forward, q, k, v, variant=RankCall(variant="cudnn", context="0")
    )
    unknown = dataclasses.replace(VARIANTS["fa3"], policy="flax")
    assert "got policy 'flax'" in said(attention.apply, q, k, v, variant=unknown)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in WITH_GRADIENTS])
def test_a_variant_without_a_backward_pass_refuses_gradients(name):  # A-1
    leaves = inputs(requires_grad=True)
    message = (
        f"variant '{name}' has no backward pass (A-1). Use one of exact, bf16, cudnn, mxfp8, "
        "fp8ref.spec.attention.variants.differentiated(variant, 'bf16'), or call under "
        "torch.no_grad()."
    )
    assert said(attention.apply, *leaves, variant=name) == message
    assert message in said(attention.backward, leaves[0], *leaves, None, variant=name)
    with torch.no_grad():
        assert attention.apply(*leaves, variant=name).any()


def test_backward_refuses_what_is_not_forwards():
    q, k, v = inputs()
    result = attention.forward(q, k, v, variant="cudnn")
    assert "result is what forward returned" in said(
        attention.backward, q, q, k, v, None, variant="cudnn"
    )
    for name, roles in (("bf16", "q, k, v"), ("exact", "no role")):
        message = f"result is of forward by variant 'cudnn'; got another's, with tensors of {roles}"
        assert message in said(
            attention.backward,
            q,
            q,
            k,
            v,
            attention.forward(q, k, v, variant=name),
            variant="cudnn",
        )
    assert "by variant 'bf16'; got another's" in said(
        attention.backward, q, q, k, v, result, variant="bf16"
    )
    assert "do has the shape of o" in said(
        attention.backward, q[:, :, :3], q, k, v, result, variant="cudnn"
    )
    assert "got 'q'" in said(
        attention.backward, q, q, k, v, result, variant="cudnn", scales={"q": torch.ones(())}
    )


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients_are_not_differentiated_again(name):
    leaves = inputs(requires_grad=True)
    o = attention.apply(*leaves, variant=name)
    with pytest.raises(ValueError, match=r"create_graph=True"):
        torch.autograd.grad(o.sum(), leaves, create_graph=True)


def test_simulated_hardware_has_no_mx_blocks():  # G-19
    with hardware.simulating(sim_hardware.by_name("exact")):
        assert "so simulated hardware cannot multiply them" in said(
            attention.apply, *inputs(), variant="mxfp8"
        )
        assert attention.apply(*inputs(), variant="cudnn").any()


# ---- Under torch.compile


def compiled_equals_eager(name, backend, tq=40, tk=150, **options):
    call = Call(variant=name, mask=Mask(causal=True), **options)
    leaves = inputs(requires_grad=name in WITH_GRADIENTS, tq=tq, tk=tk)
    documents = torch.zeros(1, tq, dtype=torch.long), (torch.arange(tk)[None] > 100).long()

    def function(q, k, v, *documents):
        return attention.apply(q, k, v, variant=call, documents=documents)

    torch._dynamo.reset()
    eager, compiled = (
        function(*leaves, *documents),
        torch.compile(function, fullgraph=True, backend=backend)(*leaves, *documents),
    )
    outputs = [(eager, compiled)]
    if name in WITH_GRADIENTS:
        do = torch.randn_like(eager)
        outputs += zip(
            *(torch.autograd.grad(o, leaves, do) for o in (eager, compiled)), strict=True
        )
    return outputs


@pytest.mark.parametrize("name", ["fa3", "fa4_threshold4"])
def test_one_graph_has_eagers_bits(name):
    for eager, compiled in compiled_equals_eager(name, "aot_eager"):
        assert torch.equal(eager, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exact", "bf16", "cudnn", "mxfp8", "fa3_paper"])
def test_one_graph_with_gradients_or_blocks_has_eagers_bits(name):
    for eager, compiled in compiled_equals_eager(name, "aot_eager"):
        assert torch.equal(eager, compiled)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # inductor's own
def test_inductor_has_eagers_bits():
    """With exponentials in float64, which both round to float32: inductor's float32 exp2 is another
    than torch's. One short tile: to compile sums in order takes minutes for long ones."""
    for eager, compiled in compiled_equals_eager(
        "fa3", "inductor", tq=8, tk=16, arithmetic="stated"
    ):
        assert torch.equal(eager, compiled)


def test_a_mask_may_be_made_inside_and_a_variant_may_not():
    """Dynamo hands on a dataclass that is made where it traces without its values (torch 2.13)."""
    q, k, v = inputs(tq=5)

    def of_mask(q, k, v):
        return attention.apply(
            q, k, v, variant="fa3", mask=Mask(window=(3, None), alignment="start")
        )

    def of_variant(q, k, v):
        return attention.apply(q, k, v, variant=dataclasses.replace(VARIANTS["fa4"], threshold=4.0))

    assert torch.equal(
        torch.compile(of_mask, fullgraph=True, backend="aot_eager")(q, k, v), of_mask(q, k, v)
    )
    try:
        torch.compile(of_variant, fullgraph=True, backend="aot_eager")(q, k, v)
    except Exception as error:
        assert "a Variant is made outside of compiled code" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a variant of other values was taken")


# ---- Memory and launches


class Largest(TorchDispatchMode):
    """Keeps the most elements that a tensor has."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.found = max(self.found, x.numel())
        return out


def largest_of(name, length, mask, arithmetic):
    leaves = inputs(
        h=2,
        heads=1,
        tq=length,
        tk=length,
        d=32,
        requires_grad=name in WITH_GRADIENTS,
        device="meta",
    )
    with Largest() as seen:
        o = attention.apply(*leaves, variant=Call(variant=name, mask=mask, arithmetic=arithmetic))
        if name in WITH_GRADIENTS:
            o.backward(torch.empty_like(o))
    return seen.found


@pytest.mark.grid(2)
@pytest.mark.parametrize("arithmetic", ARITHMETIC)
@pytest.mark.parametrize("name", VARIANTS)
def test_memory_is_linear_in_the_tokens(name, arithmetic):  # A-18
    """A tile's scores are the largest tensor: of twice the tokens it has twice the elements."""
    tile = VARIANTS[name].tile(32, CAUSAL)
    for length in (5 * tile, 10 * tile):
        assert largest_of(name, length, CAUSAL, arithmetic) == 2 * length * tile


class Rows(TorchDispatchMode):
    """Adds up M N of GEMMs, and counts them."""

    def __init__(self):
        super().__init__()
        self.gemms, self.elements = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::_scaled_mm":
            self.gemms, self.elements = self.gemms + 1, self.elements + out.numel()
        return out


def test_what_nobody_sees_is_not_multiplied():  # A-6
    """Eight tiles of 128: under a causal mask a tile has the rows from its first key on, 9 / 16 of
    the work; a window has still less.
    """
    found = {}
    for label, mask in {
        "full": Mask(),
        "causal": CAUSAL,
        "local": Mask(window=(127, 0)),
        "ahead": Mask(window=(None, 0)),
    }.items():
        with Rows() as seen:
            attention.apply(
                *inputs(b=2, h=4, heads=2, tq=1024, tk=1024, d=128, device="meta"),
                variant="cudnn",
                mask=mask,
            )
        found[label] = seen.elements / 2 / 4 / 1024 / (1024 + 8 * 128)
        assert seen.gemms == 2 * 8 * 2 * 2  # scores and values, tiles, sequences, heads of keys
    assert found["full"] == 1
    assert found["causal"] == found["ahead"] == 9 / 16
    assert found["local"] < 2 / 8


def test_a_pass_reads_nothing_and_copies_nothing():
    """On the meta device a read raises, since there is no memory, and so does a copy from the
    host.
    """
    documents = (
        torch.zeros(1, 70, dtype=torch.long, device="meta"),
        torch.zeros(1, 150, dtype=torch.long, device="meta"),
    )
    for name in VARIANTS:
        leaves = inputs(requires_grad=name in WITH_GRADIENTS, device="meta")
        for _ in range(2):  # the unit scale of GEMMs is made the first time
            with Ops():
                o = attention.apply(*leaves, variant=name, mask=CAUSAL, documents=documents)
                if name in WITH_GRADIENTS:
                    o.backward(torch.empty_like(o))
        with Syncs() as seen:
            attention.apply(*leaves, variant=name, mask=CAUSAL, documents=documents)
        assert seen.found == []


def test_q_k_and_v_are_kept_as_codes():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attention.apply(*inputs(requires_grad=True), variant="cudnn")
    assert sorted(tuple(x.shape) for x in kept if x.ndim == 4) == sorted(
        [(1, 4, 70, 64)] * 2 + [(1, 2, 150, 64)] * 2
    )
    assert {x.dtype.itemsize for x in kept if x.ndim == 4} == {1}
    assert max(x.numel() for x in kept if x.ndim != 4) == 4 * 70  # lse


# ---- Ranks


def on_a_rank(name, along):
    """This rank's part of o and the gradients, and amaxes: sequences or heads cut in two."""
    dim, rank = {"batch": 0, "heads": 1}[along], distributed.get_rank()
    whole = [*inputs(b=2), torch.randn(2, 4, 70, 64, generator=torch.Generator().manual_seed(5))]
    *leaves, do = (x.chunk(2, dim)[rank].clone() for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    group = distributed.group.WORLD.group_name
    call = RankCall(variant=name, mask=CAUSAL, amax_group=group)
    o = attention.apply(*leaves, variant=call)
    o.backward(do)
    result = attention.forward(*leaves, variant=call)
    found = attention.backward(do, *leaves, result, variant=call)
    amaxes = {role: x.numpy() for role, x in (result.amaxes | found.amaxes).items() if x.ndim == 0}
    return [x.detach().numpy() for x in (o, *(leaf.grad for leaf in leaves))], amaxes


@pytest.mark.slow  # most of it is the start of the first two ranks
@pytest.mark.parametrize("along", ["batch", "heads"])
@pytest.mark.parametrize("name", ["cudnn", "exact", "bf16"])
def test_ranks_share_the_amaxes_of_whole_tensors(name, along):  # P-2
    whole, do = (
        inputs(b=2, requires_grad=True),
        torch.randn(2, 4, 70, 64, generator=torch.Generator().manual_seed(5)),
    )
    o = attention.apply(*whole, variant=name, mask=CAUSAL)
    o.backward(do)
    result = attention.forward(*whole, variant=name, mask=CAUSAL)
    found = attention.backward(do, *whole, result, variant=name, mask=CAUSAL)
    ranks = run(2, on_a_rank, name, along)
    for n, x in enumerate((o, *(leaf.grad for leaf in whole))):
        parts = np.concatenate(
            [tensors[n] for tensors, _ in ranks], axis={"batch": 0, "heads": 1}[along]
        )
        np.testing.assert_array_equal(parts, x.detach().numpy())
    for _, amaxes in ranks:
        for role, x in (result.amaxes | found.amaxes).items():
            np.testing.assert_array_equal(amaxes[role], x.numpy(), err_msg=role)


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_dtensors_are_refused(mesh):
    q, k, v = inputs()
    q = distributed.tensor.distribute_tensor(q, mesh, [distributed.tensor.Replicate()])
    assert said(attention.forward, q, k, v, variant="cudnn") == (
        "attention takes local tensors; got q, a DTensor. Use .to_local() and amax_group."
    )


# ---- Delayed scales


class Delayed(nn.Module):
    """Attention whose scales come from states."""

    roles = ("q", "k", "v", "s", "o", "do", "ds", "dq", "dk", "dv")

    def __init__(self):
        super().__init__()
        config = dataclasses.replace(delayed_configs.by_name("delayed"), history_length=2)
        self.states = nn.ModuleDict(
            {role: delayed.RoleState(E4M3FN, config, torch.device("cpu")) for role in self.roles}
        )

    def forward(self, q, k, v):
        scales, seen = (
            {role: getattr(state, name) for role, state in self.states.items()}
            for name in ("scale", "seen")
        )
        role_scales = RoleScales(scales, seen)
        return attention.apply(q, k, v, variant="cudnn", mask=CAUSAL, scales=role_scales)


def test_states_are_observed_and_updated():  # A-12, H-3 to H-5
    """After a step a role's scale is that of its amax, of the role with the scales before."""
    model, leaves, do = Delayed(), inputs(requires_grad=True), torch.randn(1, 4, 70, 64)
    for step in range(2):
        scales = {role: state.scale.clone() for role, state in model.states.items()}
        forward_scales, others = (
            {r: x for r, x in scales.items() if (r in ("q", "k", "v", "s", "o")) is first}
            for first in (True, False)
        )
        result = attention.forward(*leaves, variant="cudnn", mask=CAUSAL, scales=forward_scales)
        wanted = attention.backward(
            do, *leaves, result, variant="cudnn", mask=CAUSAL, scales=others
        )
        o = model(*leaves)
        o.backward(do)
        for role, amax in (result.amaxes | wanted.amaxes).items():
            assert model.states[role].seen.tolist() == [amax.item(), 0, 1], role
        assert torch.equal(o, result.o)
        delayed.update(model)
        for role, state in model.states.items():
            assert not state.seen.any()
            assert state.scale != scales[role] or step == 1
    assert (
        result.o - attention.forward(*leaves, variant="exact", mask=CAUSAL).o
    ).norm() < 0.1 * result.o.norm()


def test_one_graph_observes():
    torch._dynamo.reset()
    leaves, do, found = inputs(tq=20, tk=40, requires_grad=True), torch.randn(1, 4, 20, 64), []
    for compiled in (False, True):
        model = Delayed()
        function = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        function(*leaves).backward(do)
        found.append(torch.stack([state.seen for state in model.states.values()]))
    assert torch.equal(*found)
    assert found[0][:, 2].all()


def test_nothing_is_found_that_nobody_asked_for():
    """With all scales given, no amax is taken but the maxima of rows."""
    leaves = inputs(requires_grad=True, tk=128, device="meta")
    one = torch.ones((), device="meta")
    with Ops() as ops:
        o = attention.apply(*leaves, variant="cudnn", scales=dict.fromkeys(Delayed.roles, one))
        o.backward(torch.empty_like(o))
    assert ops.found.count("amax") == 1


def test_observations_of_other_roles_are_refused():
    q, k, v = inputs()
    seen = torch.zeros(3)
    assert "observes no role; got 'q'" in said(
        attention.apply, q, k, v, variant="fa3", scales=RoleScales({}, {"q": seen})
    )
    assert "observes q, k, v, s, o, do, ds, dq, dk, dv; got 'x'" in said(
        attention.apply, q, k, v, variant="cudnn", scales=RoleScales({}, {"x": seen})
    )
    assert "a RoleState's seen, float32 [3]; got torch.float32 [2]" in said(
        attention.apply, q, k, v, variant="cudnn", scales=RoleScales({}, {"q": seen[:2]})
    )
