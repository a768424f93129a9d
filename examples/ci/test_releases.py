"""Released libraries, asked by the plugin: what is right is required, and what is not is quoted.

A test is skipped where its library is missing: pip install onnx gfloat pychop compressed-tensors.
"""

import numpy as np
import pytest

# onnx 1.23.2, gfloat 0.5.2, pychop 0.6.2, compressed-tensors 0.20.1: 2026-11-30


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_onnx(fp8ref_kit, fmt):
    onnx = pytest.importorskip("onnx")
    reference = pytest.importorskip("onnx.reference")
    to = getattr(onnx.TensorProto, f"FLOAT8{fmt.upper()}")
    names = (("x", onnx.TensorProto.FLOAT), ("y", to))
    x, y = (onnx.helper.make_tensor_value_info(name, kind, None) for name, kind in names)
    node = onnx.helper.make_node("Cast", ["x"], ["y"], to=to, saturate=1)
    graph = onnx.helper.make_graph([node], "cast", [x], [y])
    session = reference.ReferenceEvaluator(onnx.helper.make_model(graph))

    def cast(x):
        codes = session.run(None, {"x": np.asarray(x, np.float32)})[0]
        return np.asarray(codes).view(np.uint8).reshape(np.shape(x))

    fp8ref_kit.require_cast(cast, fmt)


@pytest.mark.parametrize("mode", ["nearest", "up", "down"])
def test_onnx_e8m0(fp8ref_kit, mode):
    """The report of ``nearest`` says that subnormals are rounded by their field."""
    helper = pytest.importorskip("onnx.numpy_helper")

    def cast(x):
        return helper.to_float8e8m0(np.asarray(x, np.float32), round_mode=mode)

    fp8ref_kit.require_cast(cast, "e8m0fnu", expect=f"onnx_{mode}")


@pytest.mark.parametrize("fmt", ["e4m3fn", "e5m2"])
def test_gfloat(fp8ref_kit, fmt):
    gfloat = pytest.importorskip("gfloat")
    formats = pytest.importorskip("gfloat.formats")
    info = getattr(formats, f"format_info_ocp_{fmt.removesuffix('fn')}")

    def cast(x):
        x = np.asarray(x, np.float64)
        rounded = gfloat.round_ndarray(info, x, gfloat.RoundMode.TiesToEven, True)
        return gfloat.encode_ndarray(info, rounded).astype(np.uint8)

    def decode(codes):
        return gfloat.decode_ndarray(info, np.asarray(codes)).astype(np.float32)

    fp8ref_kit.require_cast(cast, fmt)
    fp8ref_kit.require_decoder(decode, fmt)


@pytest.mark.parametrize("precision", range(1, 8))
@pytest.mark.parametrize("domain", ["extended", "finite"])
def test_pychop_p3109(fp8ref_kit, precision, domain):
    pychop = pytest.importorskip("pychop")
    fmt = pychop.P3109Format(k=8, precision=precision, signed=True, domain=domain)
    name = f"binary8p{precision}s{domain[0]}"

    def cast(x):
        codes = pychop.p3109_encode(np.asarray(x, np.float64), fmt, saturate=True)
        return np.asarray(codes).astype(np.uint8)

    def decode(codes):
        return np.asarray(pychop.p3109_decode(np.asarray(codes), fmt), np.float32)

    fp8ref_kit.require_cast(cast, name)
    fp8ref_kit.require_decoder(decode, name)


def test_pychop_loses_large_numbers(fp8ref_kit):
    """Chop with 5 and 2 bits: 65536, which is above the largest number, becomes 0."""
    chop = pytest.importorskip("pychop").Chop(exp_bits=5, sig_bits=2, rmode=1)
    with pytest.raises(AssertionError, match=r"65536 \(float32 0x47800000\): got 0"):
        fp8ref_kit.require_cast(
            lambda x: np.asarray(chop(np.asarray(x, np.float64)), np.float32), "e5m2", expect=None
        )


def test_compressed_tensors_decodes_fp4(fp8ref_kit):
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")

    def decode(pairs):
        rows, columns = pairs.shape
        return helpers.unpack_fp4_from_uint8(pairs, rows, 2 * columns, torch.float32)

    fp8ref_kit.require_decoder(decode, "e2m1fn", framework="torch")


def test_compressed_tensors_scales_by_dtype(fp8ref_kit):
    """Its scale is computed in the tensor's dtype, so that bfloat16 tensors have other scales."""
    torch = pytest.importorskip("torch")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    args = quantization.QuantizationArgs(num_bits=8, type="float", strategy="channel")

    def quantize(x):
        ends = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        scale, zero = quantization.utils.calculate_qparams(*ends, args)
        codes = forward.quantize(x, scale, zero, args, dtype=torch.float8_e4m3fn)
        return {"codes": codes, "scale_inv": scale}

    words = "policy compressed_tensors, .*it gives other results for other tensors"
    with pytest.raises(AssertionError, match=words):
        fp8ref_kit.require_quantizer(quantize, expect=None, framework="torch")
