"""What an operator of a GEMM says beside its tensors."""

from typing import NamedTuple

from fp8ref.recipe import GemmSpec

__all__ = ["GemmKind"]


class GemmKind(NamedTuple):
    """The scales of both operands of an FP8 GEMM, how it accumulates, and its epilogue.

    As text where an operator takes it: that takes tensors, numbers and strings, but no objects.

    >>> GemmKind.parse(GemmKind("rowwise", "rowwise", "fast", "scale_then_round").text).accumulate
    'fast'
    """

    granularity_a: str
    granularity_b: str
    accumulate: str
    epilogue: str

    @property
    def text(self) -> str:
        """Its words, as ``parse`` reads them."""
        return " ".join(self)

    @classmethod
    def of(cls, spec: GemmSpec) -> "GemmKind":
        """The kind of a GEMM of a recipe, both of whose operands are FP8."""
        assert spec.a is not None
        assert spec.b is not None
        assert spec.accumulate is not None
        return cls(spec.a.granularity, spec.b.granularity, spec.accumulate, spec.epilogue)

    @classmethod
    def parse(cls, text: str) -> "GemmKind":
        """The kind of a text."""
        return cls(*text.split())

    @property
    def scales(self) -> str:
        """Its granularities in a proof: tensorwise next to rowwise is rowwise (L-4)."""
        pair = {self.granularity_a, self.granularity_b}
        if pair <= {"tensorwise", "rowwise"}:
            return "rowwise" if "rowwise" in pair else "tensorwise"
        return f"{self.granularity_a} x {self.granularity_b}"
