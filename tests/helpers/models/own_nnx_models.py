"""Models of a user's, for Flax NNX, as ``architecture.source`` names them."""

import jax
import jax.numpy as jnp
from flax import nnx

from fp8ref.jax.flax import GroupedLinear


class Plain(nnx.Module):
    """Two linears in FP8, one of them with a bias, and a head."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs, width: int = 32) -> None:
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(width, 2 * width, rngs=rngs),
            nnx.Linear(2 * width, width, use_bias=False, rngs=rngs),
        )
        self.head = nnx.Linear(width, vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


class Dropping(Plain):
    """With a dropout."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


class Grouped(Plain):
    """With a projection of experts."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, rngs)
        self.experts = GroupedLinear(2, 32, 32, rngs=rngs)


class Uncalling(Plain):
    """With a linear that it does not call."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, rngs)
        self.spare = nnx.Linear(32, 32, rngs=rngs)


class Misshapen(Plain):
    """Whose logits are of the last token alone."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return super().__call__(tokens)[:, -1]


class HeadFirst(nnx.Module):
    """Whose head's name comes before that of a linear of as many outputs."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        self.embed, self.head = (
            nnx.Embed(vocab_size, 64, rngs=rngs),
            nnx.Linear(64, vocab_size, rngs=rngs),
        )
        self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return jnp.tanh(self.head(x + self.down(nnx.gelu(self.up(x)))).astype(jnp.float32))


class Headless(nnx.Module):
    """Logits by the embedding's table without a linear, after a linear of as many outputs."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        self.embed, self.down = (
            nnx.Embed(vocab_size, 256, rngs=rngs),
            nnx.Linear(256, 256, rngs=rngs),
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.down(self.embed(tokens)))


class Count(nnx.Variable):
    """Of a user's."""


class Constant(Plain):
    """With a variable that stays, in a function that computes its activations again."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, rngs)
        self.count = Count(jnp.ones(()))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nnx.remat(
            lambda model, tokens: Plain.__call__(model, tokens) * model.count.get_value()
        )(self, tokens)


class Counting(Constant):
    """With a variable that every pass changes."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        self.count.set_value(self.count.get_value() + 1)
        return super().__call__(tokens)


class Failing(Plain):
    """Which cannot be called."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.down(self.embed(tokens)))
