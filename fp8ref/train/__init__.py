"""The trainer: train a Llama, or your own model, in FP8 with JAX or PyTorch, from one config.

    config = config.load("tiny")                  # config/config.py, config/sections
    loop.train(config, "jax", Path("runs/tiny"))  # batches, steps, checkpoints, logs
    export.export(Path("runs/tiny"), Path("hf"))  # models/export.py: weights for transformers

The files of one training step, in order; docs/concepts/step-in-code.md goes on into a linear:

    loop.py             calls ``model.step`` of a trainer for each batch, as the protocol of
                        run/trainer.py has it
    {jax,torch}/trainer.py  one model in training: step, evaluate, save, load, measure
    {jax,torch}/step.py     forward, backward and update (spec T)
    {jax,torch}/llama/llama.py  the model (spec M)

What a step asks of a model is {jax,torch}/model.py; {jax,torch}/llama/model.py and
{jax,torch}/custom/model.py, that of a user (``architecture``), implement it.

Paths without fp8ref/ are below this folder. The model's linears are
``fp8ref.jax.linear.apply``, and, in PyTorch, what ``LlamaModel`` puts in place of
nn.Linear by ``fp8ref.torch.model.parallel.parallelize``: torchao's Float8Linear, or
``fp8ref.torch.linear.Linear`` for ``delayed``, for recipes in blocks, and wherever several ranks
share amaxes. ``fp8ref.recipe`` says which formats, granularities and accumulation a recipe has.
Within a linear, fp8ref/{jax,torch}/quantize/scaling.py quantizes (in JAX called by
fp8ref/jax/linear/operands.py), quantize/cast.py rounds, quantize/scales.py computes a scale from an
amax, and gemm/gemm.py multiplies. fp8ref/jax/delayed.py and fp8ref/torch/delayed/__init__.py keep
scales of past amaxes. Gradients reach the float32 masters through the cast of the masters to
bfloat16, in jax/llama/model.py and torch/step.py. Under FSDP2 they are reduced in
``parallel.reduce_dtype``, float32 by default, as ``fp8ref.torch.model.parallel`` sets it.
docs/concepts/training-step.md draws the whole step, and docs/concepts/step-in-code.md lists the
files to open for it, in order. A clause such as "spec S-9" stands in docs/spec.
{jax,torch}/optimizer.py builds AdamW of optax and torch, steps, and says what a checkpoint holds of
a parameter. JAX clips gradients there, PyTorch in ``Step.update``.
{jax,torch}/llama/cross_entropy.py is the loss, or jax/llama/chunked_loss.py that of parts of the
vocabulary; jax/gradient_sums.py adds the gradients of microbatches.

``run.train_state`` declares what a checkpoint holds, and ``config.schedule`` which recipe a step
runs in. ``data`` reads tokens, ``report`` compares finished runs, and ``tensors.read`` loads
recorded operands in a notebook.
"""

from fp8ref.shared import extras

extras.require("train", "fp8ref.train", "pydantic", "tomli_w", "rich")
