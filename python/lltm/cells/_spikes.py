"""Spikes: 1 if v > 0, else 0. In backward, they have the gradient of a smooth function."""

import math

import torch


class Spike(torch.autograd.Function):
    """An arctangent in backward, as in snnTorch."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + (math.pi * v) ** 2)


class SuperSpike(Spike):
    """SuperSpike's function with a slope in backward."""

    @staticmethod
    def forward(ctx, v, slope=1):
        ctx.slope = slope
        return Spike.forward(ctx, v)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + ctx.slope * v.abs()) ** 2, None
