"""The trainer's Llama as a step has it: converted, sharded, compiled, on this process's device."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fp8ref.selection.report import quiet
from fp8ref.spec import llama
from fp8ref.torch.delayed import shared_inputs
from fp8ref.torch.model.convert import convert
from fp8ref.torch.model.parallel import Parallelism, amax_group, parallelize, share_groups
from fp8ref.train.config.config import Config
from fp8ref.train.torch.llama.llama import llama_of, widen_before_passes
from fp8ref.train.torch.model import Model


class LlamaModel(Model):
    """``Llama`` on a mesh; its parameters are empty until the step gives them ``weights``."""

    unrounded = (llama.EMBEDDING,)  # M-2

    def __init__(
        self,
        config: Config,
        weights: Mapping[str, llama.Weight] | None,
        mesh: DeviceMesh | None,
        context: ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """weights: float32 by name, by default ``llama.lazy_initial_weights`` of run.seed."""
        self._config, self._mesh, self._context = config, mesh, context
        if weights is None:
            weights = llama.lazy_initial_weights(config.model, seed=config.run.seed)
        llama.check_weights(weights, config.model)
        self.weights = weights
        self.module = self._parallelized().to_empty(device=device)
        self.twins = {recipe: self._twin(recipe) for recipe in config.recipes[1:]}

    def _parallelized(self) -> nn.Module:
        config, keys = self._config, self._config.parallel
        with torch.device("meta"):  # a rank makes its own shards
            model = llama_of(config, self._mesh, self._context)
        table = model.model.embed_tokens
        if config.optimizer.keeps_masters:
            model.to(torch.bfloat16)
            # FSDP2 reduces the gradients of a model that it gathers whole in one dtype (P-19).
            table.widens = keys.compile != "model" or keys.sharing == 1
            if keys.compile == "model" and table.widens:
                widen_before_passes(model)
        parallelism = Parallelism(
            amax_scope=keys.amax_scope,
            sequence=keys.sequence,
            checkpointing=keys.checkpointing,
            compile=keys.compile,
            kernels=config.numerics.kernels,
            cuda_graphs=keys.cuda_graphs,
            gather_fp8=keys.gather == "fp8",
            precompute_scales=keys.precompute_scales,
            ordered_reduction=keys.reduction == "ordered",
            reduce_dtype=getattr(torch, keys.reduce_dtype),
            keep_dtype=[] if keys.compile == "model" else [table],  # P-19
        )
        with quiet():
            module = parallelize(
                model,
                config.numerics.recipe,
                mesh=self._mesh,
                blocks=model.model.layers,
                filter_fqns=config.filter_fqns,
                fp8_fqns=config.numerics.fp8_fqns,
                rules=config.numerics.rules or (),
                parallelism=parallelism,
            )
        shared_inputs.share(module, llama.FIRST_READER)
        return module

    def _twin(self, recipe: str) -> nn.Module:
        with torch.device("meta"):
            model = llama_of(self._config, self._mesh, self._context)
        keys = self._config.numerics
        with quiet():
            twin = convert(
                model,
                recipe,
                filter_fqns=self._config.filter_fqns,
                fp8_fqns=keys.fp8_fqns,
                amax_group=amax_group(self._mesh, self._config.parallel.amax_scope),
                kernels=keys.kernels,
            )
        if self._mesh is not None and self._config.parallel.expert > 1:
            share_groups(twin, self._mesh)
        shared_inputs.share(twin, llama.FIRST_READER)
        return twin
