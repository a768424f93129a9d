"""What data sheets say of GPUs: peaks that no program reaches; ``ceilings`` has what programs do reach. Nothing here was measured."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """bf16, fp8: dense FLOP a second of the tensor cores. bandwidth: bytes a second. memory: bytes. processors: streaming ones (SMs)."""

    name: str
    bf16: float
    fp8: float
    bandwidth: float
    memory: float
    source: str
    processors: int = 132


_SPARSE = "tensor-core figures there are with sparsity, halved here"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="H100 SXM",
            bf16=1979e12 / 2,
            fp8=3958e12 / 2,
            bandwidth=3.35e12,
            memory=80e9,
            source=f"NVIDIA H100 Tensor Core GPU data sheet, column H100 SXM; {_SPARSE}",
        ),
        Gpu(
            name="H200 SXM",
            bf16=1979e12 / 2,
            fp8=3958e12 / 2,
            bandwidth=4.8e12,
            memory=141e9,
            source=f"NVIDIA H200 Tensor Core GPU data sheet, column H200 SXM; {_SPARSE}",
        ),
    )
}
