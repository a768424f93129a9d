"""Models of a user's, for Flax NNX, as ``architecture.source`` names them."""

import jax
from flax import nnx


class Plain(nnx.Module):
    """Two linears in FP8, one of them with a bias, and a head."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs, width: int = 32) -> None:
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(width, vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


class Dropping(Plain):
    """With a dropout."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)


class Uncalling(Plain):
    """With a linear that it does not call."""

    def __init__(self, vocab_size: int, rngs: nnx.Rngs) -> None:
        super().__init__(vocab_size, rngs)
        self.spare = nnx.Linear(32, 32, rngs=rngs)


class Misshapen(Plain):
    """Whose logits are of the last token alone."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return super().__call__(tokens)[:, -1]
