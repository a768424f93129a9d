import adamw
import torch

from fp8ref.torch.train import Trainer


def test_optimizer_is_clipped_adamw_as_specified(small, monkeypatch):  # T-1, T-2, T-3
    slope = adamw.slopes(small)

    def loss(self, tokens):
        return sum((p * torch.from_numpy(slope[name])).sum() for name, p in self._params.items())

    monkeypatch.setattr(Trainer, "_loss", loss)
    adamw.check(Trainer, small, slope)
