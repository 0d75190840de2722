"""The published Scion, slow and plain: what `convert` must take over exactly. Polar factors by SVD."""

import math
from typing import Any

import torch
from torch import Tensor


def spectral(g: Tensor, *, max: bool = False, normalized: bool = True, steps: int = 5) -> Tensor:
    d_out, d_in = g.shape
    scale = math.sqrt(d_out / d_in) if normalized else math.sqrt(d_out)
    if max and scale < 1:
        scale = 1.0
    U, _, Vh = torch.linalg.svd(g, full_matrices=False)
    return scale * U @ Vh


def spectral_conv(g: Tensor, *, steps: int = 5) -> Tensor:
    U, _, Vh = torch.linalg.svd(g.reshape(len(g), -1), full_matrices=False)
    taps = g.shape[2] if g.ndim == 3 else g.shape[2] ** 2
    return math.sqrt(g.shape[0] / g.shape[1]) / taps * (U @ Vh).reshape(g.shape)


def sign(g: Tensor, *, zero_init: bool = False, normalized: bool = True) -> Tensor:
    return torch.sign(g) / (g.shape[1] if normalized else 1)


def bias_rms(g: Tensor) -> Tensor:
    return g / g.square().mean().sqrt()


def col_norm(g: Tensor, *, normalized: bool = False, transpose: bool = False) -> Tensor:
    if transpose:
        return col_norm(g.T, normalized=normalized).T
    u = torch.stack([g[:, j] / g[:, j].square().mean().sqrt() for j in range(g.shape[1])], 1)
    return u / g.shape[1] if normalized else u


def row_norm(g: Tensor, *, normalized: bool = True, transpose: bool = False) -> Tensor:
    if transpose:
        return row_norm(g.T, normalized=normalized).T
    u = torch.stack([row / row.norm() for row in g])
    return u / math.sqrt(g.shape[1]) if normalized else u


NORMS = {
    "Spectral": spectral,
    "SpectralConv": spectral_conv,
    "Sign": sign,
    "BiasRMS": bias_rms,
    "ColNorm": col_norm,
    "RowNorm": row_norm,
}


class Scion(torch.optim.Optimizer):
    """theta <- (1 - lr) theta - lr scale lmo(m); unconstrained: without the (1 - lr). momentum weighs the new gradient."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 1.0, norm: str = "Auto", norm_kwargs: Any = None,
                 scale: float = 1.0, unconstrained: bool = False):  # fmt: skip
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "scale": scale,
                "unconstrained": unconstrained,
                "norm": norm,
                "norm_kwargs": norm_kwargs or {},
            },
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                m.mul_(1 - group["momentum"]).add_(p.grad, alpha=group["momentum"])
                norm = group["norm"]
                if norm == "Auto":
                    norm = "BiasRMS" if p.ndim < 2 else "Spectral" if p.ndim == 2 else "SpectralConv"
                u = group["scale"] * NORMS[norm](m, **group["norm_kwargs"])
                if not group["unconstrained"]:
                    p.mul_(1 - group["lr"])
                p.sub_(u, alpha=group["lr"])
