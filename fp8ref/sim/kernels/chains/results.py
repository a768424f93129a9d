"""What a tensor core's chains begin from and give, in LLVM's vectors: by tiles of columns."""

from llvmlite import ir
from numba.core import cgutils

from fp8ref.sim.kernels.chains.vectors import F32, I32, I64, LANES, Vectors


class Results(Vectors):
    """Writes loops over some rows of a tile of the result, 16 columns at a time.

    acc    float32 [2, M, LANES]: accumulators, and the sums of parts.
    out    float32 [M, N], of which columns from ``first`` on are the tile's, as many as there are.
    sizes  ``Sizes``.
    """

    def __init__(self, builder: ir.IRBuilder, out, acc, sizes, first) -> None:
        super().__init__(builder, double=False)
        self.out, self.acc, self.first = out, acc, first
        self.m, self.n = self.size(sizes, "m"), self.size(sizes, "n")
        self.vector, lanes = ir.VectorType(F32, 16), ir.VectorType(I64, 16)
        left = self.splat(builder.sub(self.n, first), 16)
        self.masks = [
            builder.icmp_signed("<", ir.Constant(lanes, list(range(j, j + 16))), left)
            for j in range(0, LANES, 16)
        ]

    def take(self, row, rows) -> None:
        """acc = out; lanes past N are set to 0."""
        for out_pointer, acc_pointer, _, mask in self._vectors(row, rows):
            self.b.store(self._loaded(out_pointer, mask), acc_pointer, align=4)

    def give(self, row, rows) -> None:
        """out = acc."""
        for out_pointer, acc_pointer, _, mask in self._vectors(row, rows):
            self._stored(self.b.load(acc_pointer, align=4), out_pointer, mask)

    def end(self, row, rows, part) -> None:
        """Accumulators are added to the sums of parts, and cleared.

        If a ``part`` ends, its sum is added to the result, and cleared.
        """
        b, zero = self.b, self.constant(self.vector, 0.0)
        ends = self.splat(part, 16)
        for out_pointer, acc_pointer, sum_pointer, mask in self._vectors(row, rows):
            total, mask = (
                b.fadd(b.load(sum_pointer, align=4), b.load(acc_pointer, align=4)),
                b.and_(mask, ends),
            )
            self._stored(b.fadd(self._loaded(out_pointer, mask), total), out_pointer, mask)
            b.store(b.select(ends, zero, total), sum_pointer, align=4)
            b.store(zero, acc_pointer, align=4)

    def _vectors(self, first_row, rows):
        """For each 16 columns of a row: offsets in out, accumulators, sums; which exist."""
        b, pointer = self.b, self.vector.as_pointer()
        sums_offset = self.times(self.m, LANES)
        with cgutils.for_range(b, rows) as loop:
            row = b.add(first_row, loop.index)
            row_offset = b.add(b.mul(row, self.n), self.first)
            for v, mask in enumerate(self.masks):
                at = self.plus(self.times(row, LANES), 16 * v)
                out_pointer = b.gep(self.out, [self.plus(row_offset, 16 * v)])
                acc_pointer, sum_pointer = (
                    b.bitcast(b.gep(self.acc, [i]), pointer) for i in (at, b.add(at, sums_offset))
                )
                yield b.bitcast(out_pointer, pointer), acc_pointer, sum_pointer, mask

    def _loaded(self, pointer, mask):
        """16 numbers, 0 where masked."""
        values = pointer, ir.Constant(I32, 4), mask, self.constant(self.vector, 0.0)
        return self.intrinsic("masked.load.v16f32.p0", self.vector, *values)

    def _stored(self, value, pointer, mask) -> None:
        """Store 16 numbers where the mask is set."""
        values = value, pointer, ir.Constant(I32, 4), mask
        self.intrinsic("masked.store.v16f32.p0", ir.VoidType(), *values)
