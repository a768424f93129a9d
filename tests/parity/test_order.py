"""Which sequences the pieces of a global batch are made of, in either backend (spec D-3, P-10)."""

import hashlib
from types import SimpleNamespace

import numpy as np

from fp8ref.train.data import loader
from fp8ref.train.jax.mesh import Layout
from fp8ref.train.torch import rank_parts

STEPS = 1000


def torch_pieces(config, tokens: np.ndarray) -> list[np.ndarray]:
    """What every rank takes, in their order on the mesh."""

    def mesh(data: int, fsdp: int) -> SimpleNamespace:
        return SimpleNamespace(get_local_rank={"data": data, "fsdp": fsdp}.get)

    keys = config.parallel
    return [
        rank_parts.own(tokens, config, mesh(i, j), None)
        for i in range(keys.data)
        for j in range(keys.fsdp)
    ]


def jax_pieces(layout: Layout, tokens: np.ndarray) -> list[np.ndarray]:
    """What lies on every device, in their order on the mesh."""
    lying = {
        shard.device: np.asarray(shard.data)
        for shard in layout.put(tokens, layout.tokens).addressable_shards
    }
    return [lying[device] for device in layout.devices]


def test_any_number_of_devices_sees_the_same_global_batches_in_both_backends(small):  # D-3, P-10
    """The hash of 1,000 steps, put together of what 1, 2 and 8 devices see of each."""
    small = small.replace(data={"batch_size": 8})
    batches = loader.open_batches(small)
    meshes = [{}, {"data": 2}, {"fsdp": 8}, {"data": 2, "fsdp": 4}]
    configs = [small.replace(parallel=keys) for keys in meshes]
    layouts = [Layout(config) for config in configs]
    hashes = [[hashlib.sha256() for _ in range(2)] for _ in meshes]
    for step in range(STEPS):
        tokens = batches.step(step)
        for config, layout, (by_torch, by_jax) in zip(configs, layouts, hashes, strict=True):
            for hashed, pieces in (
                (by_torch, torch_pieces(config, tokens)),
                (by_jax, jax_pieces(layout, tokens)),
            ):
                assert len(pieces) == config.parallel.devices
                hashed.update(np.concatenate(pieces))
    assert len({hashed.hexdigest() for both in hashes for hashed in both}) == 1
