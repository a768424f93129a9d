"""Faults of optimizers: a step of AdamW for one tensor, (p, g, state) -> (p, state)."""

import numpy as np
from museum import ask
from museum.arithmetic import F, bf16, bits, codes, decoded, number, through
from museum.exhibit import Exhibit

from fp8ref.conformance.optimizer.forms import Numbers


def kept(x):
    return x


def adamw(
    *,
    m=(kept, kept),
    v=(kept, kept),
    step=lambda t: t + 1,
    betas=lambda b1, b2: (b1, b2),
    corrected=lambda b1, b2: (b1, b2),
    gradient=lambda g, p, weight_decay: g,
    decayed=None,
    store_p=kept,
):
    """AdamW in float32, in the specification's order; the arguments are what the exhibits change:
    how moments are stored and loaded, the step counted, the betas of the averages and of the
    corrections, the gradient, and how weights are decayed and kept."""
    (store_m, load_m), (store_v, load_v) = m, v

    def update(p, g, state, learning_rate, b1, b2, eps, weight_decay):
        t = step(0 if state is None else state["step"])
        m = np.zeros_like(p) if state is None else load_m(state["m"])
        v = np.zeros_like(p) if state is None else load_v(state["v"])
        own1, own2 = betas(b1, b2)
        g = gradient(g, p, weight_decay)
        m = F(own1) * m + F(1 - own1) * g
        v = F(own2) * v + F(1 - own2) * (g * g)
        c1, c2 = corrected(b1, b2)
        i1, i2 = F(1 / (1 - c1**t)), F(1 / (1 - c2**t) ** 0.5)
        ratio = (m * i1) / (np.sqrt(v) * i2 + F(eps))
        if decayed is None:
            p = p - F(learning_rate) * (ratio + F(weight_decay) * p)
        else:
            p = decayed(p, ratio, learning_rate, weight_decay)
        return store_p(p), {"m": store_m(m), "v": store_v(v), "step": t}

    return update


def bf16_step(t):
    """A counter in bfloat16: 256 + 1 is 256."""
    return float(bf16(t + 1))


def one_counter():
    """One counter serves all tensors of a dtype."""
    steps = [0]

    def count(t):
        steps[0] += 1
        return steps[0]

    return count


def truncated(x):
    """A hyperparameter cut to bfloat16."""
    return float(number(bits(x) & np.uint32(0xFFFF0000)))


def split_master(x):
    """A float32 weight as a bfloat16 and 16 low bits: joining takes 1 from the upper half where the
    low bits are negative, as if ties had been rounded up."""
    low = (bits(x) & 0xFFFF).astype(np.int64)
    upper = (bits(bf16(x)) >> 16).astype(np.int64)
    return number((upper - (low >= 0x8000)) << 16 | low)


def split_up(x):
    """The same with ties rounded up."""
    low = (bits(x) & 0xFFFF).astype(np.int64)
    upper = (bits(x).astype(np.int64) + 0x8000) >> 16
    return number((upper - (low >= 0x8000)) << 16 | low)


def in_float16(x):
    """Without a scale: numbers below 6e-8 are 0."""
    return through(x, np.float16)


def affine(m):
    """Eight bits between the smallest and the largest number, without an exact zero."""
    low, step = m.min(), (m.max() - m.min()) / F(255)
    return np.rint((m - low) / step) * step + low if step else m


def factor_in_bfloat16(p, ratio, learning_rate, weight_decay):
    """The factor of the decay, rounded to bfloat16, is 1."""
    p = p * bf16(1 - learning_rate * weight_decay)
    return p - F(learning_rate) * ratio


def factor(p, ratio, learning_rate, weight_decay):
    p = p * F(1 - learning_rate * weight_decay)
    return p - F(learning_rate) * ratio


def decay_last(p, ratio, learning_rate, weight_decay):
    """The decay comes after the update."""
    p = p - F(learning_rate) * ratio
    return p * F(1 - learning_rate * weight_decay)


def not_decayed(p, ratio, learning_rate, weight_decay):
    return p - F(learning_rate) * ratio


def coupled(g, p, weight_decay):
    """The decay of Adam: it is added to the gradient."""
    return g + F(weight_decay) * p


def quantized(*, guarded):
    """Moments in e4m3 with one scale, the reciprocal of amax / 448."""

    def store(x):
        top = np.abs(x).max()
        top = np.maximum(top, F(2.0**-90)) if guarded else top
        scale = F(1) / (top / F(448))
        return {"codes": codes(x * scale), "scale_inv": np.asarray(F(1) / scale)}

    def load(moment):
        return decoded(moment["codes"]) * moment["scale_inv"]

    return adamw(m=(store, load), v=(store, load))


ADAMW = adamw()
BNB = "https://github.com/bitsandbytes-foundation/bitsandbytes/"

EXHIBITS = (
    Exhibit(
        name="ao-4915",
        link="https://github.com/pytorch/ao/pull/4915",
        library="torchao",
        year=2026,
        title="The step counter sticks at 256",
        fault=adamw(step=bf16_step),
        twin=ADAMW,
        ask=ask.optimizer(numbers=Numbers(b2=0.999)),
        named="its step stays 256",
    ),
    Exhibit(
        name="olmo-core-317",
        link="https://github.com/allenai/OLMo-core/pull/317",
        library="OLMo-core",
        year=2025,
        title="The step is never incremented",
        fault=adamw(step=lambda t: 1),
        twin=ADAMW,
        ask=ask.optimizer(),
        named="biases are corrected as at step 1 for ever",
    ),
    Exhibit(
        name="deepspeed-8471",
        link="https://github.com/deepspeedai/DeepSpeed/pull/8471",
        library="DeepSpeed",
        year=2026,
        title="One parameter's step counter serves all of its dtype",
        fault=adamw(step=one_counter()),
        twin=ADAMW,
        ask=ask.optimizer(),
        named="One counter of steps serves all tensors",
    ),
    Exhibit(
        name="tt-metal-55935",
        link="https://github.com/tenstorrent/tt-metal/issues/55935",
        library="tt-metal",
        year=2026,
        title="Hyperparameters are truncated to bfloat16",
        fault=adamw(betas=lambda b1, b2: (truncated(b1), truncated(b2))),
        twin=ADAMW,
        ask=ask.optimizer(),
        named="betas are rounded to bfloat16 in the averages",
    ),
    Exhibit(
        name="apex-1842",
        link="https://github.com/NVIDIA/apex/issues/1842",
        library="apex",
        year=2024,
        title="A float32 master stored as bfloat16 and 16 low bits is not the same afterwards",
        fault=adamw(store_p=split_master),
        twin=adamw(store_p=split_up),
        ask=ask.optimizer(),
        unnamed="got 0.3154296875 (0x3EA18000), expected 0.3173828125 (0x3EA28000) of layout 'float32' (O-6)",
    ),
    Exhibit(
        name="ultralytics-24085",
        link="https://github.com/ultralytics/ultralytics/pull/24085",
        library="Ultralytics",
        year=2026,
        title="A second moment stored in float16 becomes zero",
        fault=adamw(v=(in_float16, kept)),
        twin=ADAMW,
        ask=ask.optimizer(),
        named="float32 with fmt float16 of v",
    ),
    Exhibit(
        name="flashoptim-2",
        link="https://github.com/databricks/flashoptim/issues/2",
        library="flashoptim",
        year=2026,
        title="float32 states are rounded to the parameter's dtype on every store",
        fault=adamw(m=(bf16, kept), v=(bf16, kept)),
        twin=ADAMW,
        ask=ask.optimizer(),
        named="layout 'bfloat16', bit for bit",
    ),
    Exhibit(
        name="unsloth-zoo-962",
        link="https://github.com/unslothai/unsloth-zoo/pull/962",
        library="unsloth-zoo (MLX)",
        year=2026,
        title="A quantized zero of the first moment is not zero",
        fault=adamw(m=(affine, kept)),
        twin=ADAMW,
        ask=ask.optimizer(),
        unnamed="got 0.00055368244647979736 (0x3A112500), expected -0.00010020238551078364 (0xB8D223BF) of layout 'float32' (O-8)",
    ),
    Exhibit(
        name="onetrainer-996",
        link="https://github.com/Nerogar/OneTrainer/issues/996",
        library="OneTrainer",
        year=2025,
        title="Weight decay in bfloat16 does nothing",
        fault=adamw(decayed=factor_in_bfloat16),
        twin=adamw(decayed=factor),
        ask=ask.optimizer(),
        named="decay is none",
    ),
    Exhibit(
        name="bitsandbytes-2010",
        link=BNB + "issues/2010",
        library="bitsandbytes",
        year=2026,
        title="Weight decay comes before the update in one backend, after it in another",
        fault=adamw(decayed=decay_last),
        twin=ADAMW,
        ask=ask.optimizer(specified=True),
        named="decay is after",
    ),
    Exhibit(
        name="te-1078",
        link="https://github.com/NVIDIA/TransformerEngine/pull/1078",
        library="Transformer Engine",
        year=2024,
        title="An FP8 moment that is all zero has an infinite scale",
        fault=quantized(guarded=False),
        twin=quantized(guarded=True),
        ask=ask.optimizer("te"),
        named="m of a tensor without gradients is NaN, or has no finite scale",
    ),
    Exhibit(
        name="tt-metal-53212",
        link="https://github.com/tenstorrent/tt-metal/issues/53212",
        library="tt-metal",
        year=2026,
        title="After a resume biases are corrected with other betas",
        fault=adamw(corrected=lambda b1, b2: (0.9, 0.999)),
        twin=ADAMW,
        ask=ask.optimizer(),
        named="biases are corrected with betas 0.9 and 0.999",
    ),
    Exhibit(
        name="nntrainer-3527",
        link="https://github.com/nntrainer/nntrainer/pull/3527",
        library="NNTrainer",
        year=2025,
        title="AdamW decays weights as Adam does",
        fault=adamw(gradient=coupled, decayed=not_decayed),
        twin=ADAMW,
        ask=ask.optimizer(),
        named="It is Adam, not AdamW: the decay is added to the gradient",
    ),
)
