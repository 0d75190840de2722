"""Slow twins of steadynorm.optim, in the paper's notation: one layer, plain loops, fp64.

Each function trains one parameter from theta_0 through t = 0 ... T-1 and returns [theta_1, ..., theta_T]. `g(t, theta)`
is the minibatch gradient; gamma, alpha, C2 and the like are sequences, one number per step. Nothing is batched, cached
or in place, and no code is shared with the library; only the exact coefficient's root comes from steadynorm.theory,
which has twins of its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from steadynorm import theory

Gradient: TypeAlias = Callable[[int, Tensor], Tensor]
Numbers: TypeAlias = Sequence[float]


# --- Table 1: u = -lmo(A)


def polar(A: Tensor) -> Tensor:
    """U V^T of the reduced SVD."""
    U, _, Vh = torch.linalg.svd(A, full_matrices=False)
    return U @ Vh


def spectral_matrix(A: Tensor) -> Tensor:
    d_out, d_in = A.shape
    return math.sqrt(d_out / d_in) * polar(A)


def sign_matrix(A: Tensor) -> Tensor:
    return torch.sign(A) / A.shape[1]


def embedding_matrix(A: Tensor) -> Tensor:
    return torch.sign(A)


def row_matrix(A: Tensor) -> Tensor:
    """Each row over its l2 norm, over sqrt(d_in)."""
    u = torch.zeros_like(A)
    for i in range(A.shape[0]):
        u[i] = A[i] / (math.sqrt(float(A[i] @ A[i])) * math.sqrt(A.shape[1]))
    return u


def column_matrix(A: Tensor) -> Tensor:
    """Each column over its RMS."""
    u = torch.zeros_like(A)
    for j in range(A.shape[1]):
        u[:, j] = A[:, j] / math.sqrt(float(A[:, j] @ A[:, j]) / A.shape[0])
    return u


MATRIX = {
    "spectral": spectral_matrix,
    "sign": sign_matrix,
    "embedding": embedding_matrix,
    "row": row_matrix,
    "column": column_matrix,
}


def update(lmo: str, x: Tensor, blocks: int = 1) -> Tensor:
    """u = -lmo(x) of one parameter of any shape: one matrix (or vector) after the other."""
    if lmo == "bias":
        u = torch.zeros(x.numel(), dtype=x.dtype)
        size = x.numel() // blocks
        for b in range(blocks):
            part = x.reshape(-1)[b * size : (b + 1) * size]
            u[b * size : (b + 1) * size] = part / math.sqrt(float(part @ part) / size)
        return u.reshape(x.shape)
    if lmo == "conv":  # the kernel flattened to d_out x (d_in k k)
        return update("spectral", x.reshape(x.shape[0], -1), blocks).reshape(x.shape)
    if lmo == "conv-tap":  # every tap a matrix, shared out over the k k taps
        flat = x.reshape(x.shape[0], x.shape[1], -1)
        u, taps = torch.zeros_like(flat), flat.shape[2]
        for k in range(taps):
            u[:, :, k] = update("spectral", flat[:, :, k], blocks) / taps
        return u.reshape(x.shape)
    if lmo == "spectral-transposed":  # stored d_in x d_out: turn, update as d_out x d_in, turn back
        return update("spectral", x.mT, blocks).mT
    if x.ndim > 2:  # a stack of matrices
        return torch.stack([update(lmo, layer, blocks) for layer in x])
    rows = x.shape[0] // blocks
    return torch.cat([MATRIX[lmo](x[b * rows : (b + 1) * rows]) for b in range(blocks)])


# --- Algorithm 2


def corrected_decay(gamma: float, alpha: float, C2: float, *, nesterov: bool = False) -> float:
    """lambda_t = (2 - a) / (2 a C^2) gamma, Nesterov: over 1 + 4a - 6a^2 + 2a^3."""
    a = alpha
    decay = (2 - a) / (2 * a * C2) * gamma
    return decay / (1 + 4 * a - 6 * a**2 + 2 * a**3) if nesterov else decay


def scion(
    theta: Tensor,
    g: Gradient,
    gamma: Numbers,
    alpha: Numbers,
    *,
    lmo: str,
    decay: float | None = None,
    C2: Numbers = (),
    nesterov: bool = False,
    exact: bool = False,
    blocks: int = 1,
    keep: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Scion with constant `decay`; without it ScionC with C2, exact: for the lmo's own overlap kernel.

    keep: what the momentum is rounded to from one step to the next.
    """
    m = torch.zeros_like(theta)
    out = []
    for t in range(len(gamma)):
        g_t = g(t, theta)
        m = (1 - alpha[t]) * m + alpha[t] * g_t
        x = (1 - alpha[t]) * m + alpha[t] * g_t if nesterov else m
        if decay is not None:
            lambda_t = decay
        elif exact:
            kernel = theory.overlap(lmo, theta.shape, blocks=blocks)
            lambda_t = theory.weight_decay_for(C2[t], gamma[t], alpha[t], nesterov=nesterov, overlap=kernel)
        else:
            lambda_t = corrected_decay(gamma[t], alpha[t], C2[t], nesterov=nesterov)
        theta = theta + gamma[t] * (-lambda_t * theta - update(lmo, x, blocks))
        m = m.to(keep).double()
        out.append(theta)
    return out


# --- AdamC and Algorithm 1


def adamc(
    theta: Tensor,
    g: Gradient,
    gamma: Numbers,
    peak: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    *,
    decays: Numbers = (),
    amsgrad: bool = False,
) -> list[Tensor]:
    """AdamW with lambda_t = lambda gamma_t / gamma_peak, or with the lambda_t given; amsgrad: over the largest v yet."""
    b1, b2 = betas
    m, v, most = torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros_like(theta)
    out = []
    for t in range(len(gamma)):
        g_t = g(t, theta)
        m = b1 * m + (1 - b1) * g_t
        v = b2 * v + (1 - b2) * g_t**2
        most = torch.maximum(most, v)
        m_hat, v_hat = m / (1 - b1 ** (t + 1)), (most if amsgrad else v) / (1 - b2 ** (t + 1))
        lambda_t = decays[t] if decays else decay * gamma[t] / peak
        theta = theta - gamma[t] * lambda_t * theta
        theta = theta - gamma[t] * m_hat / (torch.sqrt(v_hat) + eps)
        out.append(theta)
    return out


def renormalized_adamw(
    theta: Tensor, g: Gradient, gamma: Numbers, decay: float, betas: tuple[float, float], eps: float
) -> list[Tensor]:
    """Algorithm 1 line by line; Adam's epsilon beside sqrt(v_hat), as torch has it."""
    b1, b2 = betas
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    out = []
    for t in range(len(gamma)):
        g_t = g(t, theta)
        m = b1 * m + (1 - b1) * g_t
        v = b2 * v + (1 - b2) * g_t**2
        u = (m / (1 - b1 ** (t + 1))) / (torch.sqrt(v / (1 - b2 ** (t + 1))) + eps)
        before = theta - gamma[t] * decay * theta
        theta = before - gamma[t] * u
        norm = math.sqrt(float((before**2).sum()))
        if norm >= eps:
            u_parallel = float((before * u).sum()) / norm
            theta = abs(norm - gamma[t] * u_parallel) / (math.sqrt(float((theta**2).sum())) + eps) * theta
        out.append(theta)
    return out


# --- LionC


def lion_gain(b1: float, b2: float) -> float:
    """1 + 2 sum_k (2/pi) asin(kappa b2^k), lag by lag."""
    v = (1 - b2) / (1 + b2)
    kappa = (b1 / b2) * (b1 * b2 * v + (1 - b1) * (1 - b2)) / (b1**2 * v + (1 - b1) ** 2)
    k, total = 1, 1.0
    while (term := 2 * (2 / math.pi) * math.asin(kappa * b2**k)) > 1e-18:
        total, k = total + term, k + 1
    return total


def lionc(
    theta: Tensor,
    g: Gradient,
    gamma: Numbers,
    betas: Sequence[tuple[float, float]],
    peak: float,
    decay: float,
    start: tuple[float, float],
    *,
    decays: Numbers = (),
) -> list[Tensor]:
    """Lion with lambda_t = lambda (gamma_t / gamma_peak) G(betas_t) / G(start), or with the lambda_t given."""
    m = torch.zeros_like(theta)
    out = []
    for t in range(len(gamma)):
        b1, b2 = betas[t]
        g_t = g(t, theta)
        x = b1 * m + (1 - b1) * g_t
        relative = decay * (gamma[t] / peak) * lion_gain(b1, b2) / lion_gain(*start)
        lambda_t = decays[t] if decays else relative
        theta = theta - gamma[t] * (lambda_t * theta + torch.sign(x))
        m = b2 * m + (1 - b2) * g_t
        out.append(theta)
    return out


# --- SGDC


def sgdc(
    theta: Tensor,
    g: Gradient,
    gamma: Numbers,
    alpha: Numbers,
    peak: float,
    decay: float,
    *,
    start: float,
    nesterov: bool = False,
    trace: bool = False,
    decays: Numbers = (),
) -> list[Tensor]:
    """Momentum SGD, lambda_t = lambda gamma_t / gamma_peak; trace times (start / alpha_t)^2, mu = 1 - alpha.

    decays: the lambda_t to take instead.
    """
    m = torch.zeros_like(theta)
    out = []
    for t in range(len(gamma)):
        g_t, mu = g(t, theta), 1 - alpha[t]
        new = g_t if trace else alpha[t] * g_t
        m = mu * m + new
        u = mu * m + new if nesterov else m
        lambda_t = decay * gamma[t] / peak
        if trace:
            lambda_t = lambda_t * (start / alpha[t]) ** 2
        lambda_t = decays[t] if decays else lambda_t
        theta = theta - gamma[t] * (lambda_t * theta + u)
        out.append(theta)
    return out
