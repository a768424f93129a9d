"""Triton kernels that read a tensor once and write its FP8 codes in both orders.

Hopper's tensor cores take FP8 operands along K only, and a training step reduces each tensor along
both of its axes, so that its codes are needed as [M, N] and as [N, M]. PyTorch and JAX launch the
same sources: ``fp8ref.torch.kernels`` and ``fp8ref.jax.kernels`` wrap them. Plain operations state
what each computes, and give the same bits.

    casts     codes of a tensor, by one scale or by lines; amaxes; scales of blocks
    norms     RMSNorm, with a residual: its amax, its codes
    swiglu    SwiGLU and its gradients: their amaxes, their codes
    rotary    the gradient of a rotary embedding: its amax, its codes

Importing a module here imports Triton.
"""
