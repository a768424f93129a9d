"""Quantizers of torch tensors, each wrong in one place, dtype, shape or stride that usual tests
miss.
"""

import torch

F8 = torch.float8_e4m3fn


def cast(y):
    return y.clamp(-448, 448).to(F8)


def scale_of(amax):
    return (448 / amax.double().clamp(min=1e-12)).float()


def magnitudes(x):
    return x.float().abs()


def rows(x, amax=None):
    """torchao's scales of rows: codes [M, K], scale [M, 1]."""
    scale = scale_of(magnitudes(x).amax(-1, keepdim=True) if amax is None else amax)
    return cast(x.float() * scale), scale


def whole(x, amax):
    scale = scale_of(amax)
    return cast(x.float() * scale), scale


def another_in_float16(x):
    return (
        (cast(x.float() * 0 + 1), torch.ones(x.shape[0], 1))
        if x.dtype == torch.float16
        else rows(x)
    )


def mean_in_bfloat16(x):
    return rows(x, magnitudes(x).mean(-1, keepdim=True)) if x.dtype == torch.bfloat16 else rows(x)


def divides(x):
    _, scale = rows(x)
    return cast(x.float() / (1 / scale)), scale


def compares_for_the_largest(x):
    """largest = x > largest ? x : largest, which no NaN but the first is."""
    values = magnitudes(x)
    largest = values[:, 0].clone()
    for column in values[:, 1:].unbind(1):
        largest = torch.where(column > largest, column, largest)
    return rows(x, largest[:, None])


def but_the_last_column(x):
    return whole(x, (magnitudes(x)[:, :-1] if x.shape[1] > 1 else magnitudes(x)).amax())


def whole_blocks_alone(x):
    values = magnitudes(x).reshape(-1)
    return whole(x, values[: values.numel() // 1024 * 1024 or None].amax())


def up_to_1024_rows(x):
    return whole(x, magnitudes(x)[:1024].amax())


def up_to_2048_columns(x):
    return rows(x, magnitudes(x)[:, :2048].amax(-1, keepdim=True))


def transposes_squares(x):
    codes, scale = rows(x)
    return (codes.t().contiguous() if x.shape[0] == x.shape[1] else codes), scale


def forgets_strides(x):
    return rows(
        torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, (x.numel(),)).reshape(x.shape)
    )


def forgets_an_offset(x):
    start = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, x.shape, x.stride())
    return rows(start)


def loses_lane_17(x):
    values = magnitudes(x).reshape(-1)
    return whole(x, values.masked_fill(torch.arange(values.numel()) % 32 == 17, 0).amax())


def last_column_in_bfloat16(x):
    return (
        rows(x, magnitudes(x)[:, : -1 if x.shape[1] > 1 else None].amax(-1, keepdim=True))
        if x.dtype == torch.bfloat16
        else rows(x)
    )


def strides_in_bfloat16(x):
    return forgets_strides(x) if x.dtype == torch.bfloat16 else rows(x)


def negative_nans(x):
    """Of an integer maximum that does not mask the sign."""
    return rows(x, torch.where(x.isnan() & x.signbit(), 0.0, magnitudes(x)).amax(-1, keepdim=True))


def infinity_before_nan(x):
    amax = magnitudes(x).amax(-1, keepdim=True)
    return rows(x, torch.where(x.isinf().any(-1, keepdim=True), torch.inf, amax))


def tail_of_16(x):
    codes, scale = rows(x)
    codes.view(torch.uint8)[:, x.shape[1] // 16 * 16 :] = 0
    return codes, scale


def products_in_float16(x):
    _, scale = rows(x)
    return cast(x.half() * scale.half()), scale


def adds_zero(x):
    return rows(x + 0.0)


def nan_of_all(x):
    codes, scale = rows(x)
    return codes, scale * float("nan") if scale.isnan().any() else scale


def another_scale_in_bfloat16(x):
    _, scale = rows(x)
    return cast(x.float() * scale.bfloat16().float()), scale


def one_for_zero(x):
    amax = magnitudes(x).amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, scale_of(amax))
    return cast(x.float() * scale), scale


def rolls_scales(x):
    blocks = x.float().reshape(x.shape[0], -1, 128)
    scale = scale_of(blocks.abs().amax(-1, keepdim=True))
    return cast(blocks * scale).reshape(x.shape), scale.squeeze(-1).roll(1, 1)


def calls_the_inverse_scale(x):
    codes, scale = rows(x)
    return {"codes": codes, "scale": 1 / scale}


def calls_the_scale_inverse(x):
    codes, scale = rows(x)
    return {"codes": codes, "scale_inv": scale}


def doubles_the_amax(x):
    codes, scale = rows(x)
    return {"codes": codes, "scale": scale, "amax": 2 * magnitudes(x).amax(-1, keepdim=True)}


def with_a_workspace():
    kept = {}

    def quantize(x):
        codes, scale = rows(x)
        return kept.setdefault(codes.shape, torch.empty_like(codes)).copy_(codes), scale

    return quantize


def one_call_late():
    """Codes and scales of the call before."""
    kept = []

    def quantize(x):
        kept.append(rows(x))
        del kept[:-2]
        return kept[0] if kept[0][0].shape == kept[-1][0].shape else kept[-1]

    return quantize


def delayed(calls=16):
    """By the largest of so many amaxes before, 1 at first: te_delayed."""
    history, scales = [], [torch.tensor(1.0)]

    def quantize(x):
        codes, used = cast(x.float() * scales[0]), scales[0]
        history.insert(0, magnitudes(x).amax())
        del history[calls:]
        amax = torch.stack(history).amax()
        if amax > 0 and amax.isfinite():
            scales[0] = scale_of(amax)
        return codes, used

    return quantize
