"""Slow twins of steadynorm.optim, in the paper's notation: one layer, plain loops, fp64.

Each function trains one parameter from theta_0 through t = 0 ... T-1 and returns [theta_1, ..., theta_T]. `g(t, theta)`
is the minibatch gradient; gamma, alpha, C2 and the like are sequences, one number per step. Nothing is batched, cached
or in place, and no code is shared with the library; only the exact coefficient's root comes from steadynorm.theory,
which has twins of its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from steadynorm import theory

Gradient: TypeAlias = Callable[[int, Tensor], Tensor]
Numbers: TypeAlias = Sequence[float]


# --- Table 1: u = -lmo(A)


def polar(A: Tensor) -> Tensor:
    """Return U V^T of the reduced SVD."""
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
    """Return each row over its l2 norm, over sqrt(d_in)."""
    u = torch.zeros_like(A)
    for i in range(A.shape[0]):
        u[i] = A[i] / (math.sqrt(float(A[i] @ A[i])) * math.sqrt(A.shape[1]))
    return u


def column_matrix(A: Tensor) -> Tensor:
    """Return each column over its RMS."""
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


def update(lmo: str, x: Tensor, blocks: Any = 1) -> Tensor:
    """Return u = -lmo(x) of one parameter of any shape, one matrix (or vector) after the other."""
    if lmo == "bias":
        if x.ndim == 0:
            return x.sign()
        parts = [part.flatten() for part in x.split(block_sizes(len(x), blocks))]
        return torch.cat([part / math.sqrt(float(part @ part) / len(part)) for part in parts]).reshape(x.shape)
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
    if isinstance(blocks, tuple) and blocks[0] == "inputs":  # the outputs are a sum over blocks, which share the norm
        parts = x.split(block_sizes(x.shape[1], blocks[1]), 1)
        return torch.cat([MATRIX[lmo](part) * part.shape[1] / x.shape[1] for part in parts], 1)
    return torch.cat([MATRIX[lmo](part) for part in x.split(block_sizes(x.shape[0], blocks))])


def block_sizes(length: int, blocks: Any) -> list[int]:
    return [length // blocks] * blocks if isinstance(blocks, int) else list(blocks)


# --- Algorithm 2


def corrected_decay(gamma: float, alpha: float, C2: float, *, nesterov: bool = False) -> float:
    """Return lambda_t = (2 - a) / (2 a C^2) gamma, with Nesterov divided by 1 + 4a - 6a^2 + 2a^3."""
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
    blocks: Any = 1,
    keep: torch.dtype = torch.float64,
    hold: str = "decay",
    cautious: bool = False,
) -> list[Tensor]:
    """Train by Scion with constant `decay`; without it by ScionC with C2. exact: for the lmo's own overlap kernel.

    keep: what the momentum is rounded to from one step to the next.
    """
    m = torch.zeros_like(theta)
    held = Held(hold, 0.0)
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
        elif cautious:
            lambda_t = theory.cautious_weight_decay_for(C2[t], gamma[t], alpha[t], nesterov=nesterov)
        else:
            lambda_t = corrected_decay(gamma[t], alpha[t], C2[t], nesterov=nesterov)
        u = update(lmo, x, blocks)
        if hold != "decay":
            held.target = C2[t] * float((u * u).sum())  # an exact update has its nominal length
            theta = held.step(theta, u, gamma[t], torch.ones_like(theta))
        else:
            decayed = theta * (u * theta > 0) if cautious else theta
            theta = theta + gamma[t] * (-lambda_t * decayed - u)
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
    """Train by AdamW with lambda_t = lambda gamma_t / gamma_peak, or with the given lambda_t; amsgrad: over the
    largest v yet.
    """
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
    """Train by Algorithm 1, line by line; Adam's epsilon is beside sqrt(v_hat), as in torch."""
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


# --- MuonC


def muon_gain(mu: float, *, nesterov: bool) -> float:
    """Return G = (2 - a) / a, with Nesterov over 1 + 4a - 6a^2 + 2a^3."""
    a = 1 - mu
    return (2 - a) / a / ((1 + 4 * a - 6 * a**2 + 2 * a**3) if nesterov else 1.0)


def muon_update(x: Tensor, lmo: str, adjust: str, blocks: int) -> Tensor:
    """Return polar factors times sqrt(max(1, d_out/d_in)) or 0.2 sqrt(max(d_out, d_in)), one matrix after the other."""
    if lmo == "conv":
        return muon_update(x.reshape(x.shape[0], -1), "spectral", adjust, blocks).reshape(x.shape)
    if lmo == "spectral-transposed":
        return muon_update(x.mT, "spectral", adjust, blocks).mT
    if x.ndim > 2:
        return torch.stack([muon_update(layer, lmo, adjust, blocks) for layer in x])
    d_out, d_in = x.shape[0] // blocks, x.shape[1]
    factor = math.sqrt(max(1, d_out / d_in)) if adjust == "original" else 0.2 * math.sqrt(max(d_out, d_in))
    return torch.cat([factor * polar(x[b * d_out : (b + 1) * d_out]) for b in range(blocks)])


def muonc(
    theta: Tensor,
    g: Gradient,
    gamma: Numbers,
    mu: Numbers,
    peak: float,
    decay: float,
    *,
    start: float,
    lmo: str = "spectral",
    adjust: str = "original",
    blocks: int = 1,
    nesterov: bool = True,
    C2: Numbers = (),
    corrected: bool = True,
) -> list[Tensor]:
    """Train a hidden matrix by Muon, lambda_t = lambda (gamma_t / gamma_peak) G(mu_t) / G(start), or for the target C2."""
    m = torch.zeros_like(theta)
    out = []
    for t in range(len(gamma)):
        g_t = g(t, theta)
        m = mu[t] * m + (1 - mu[t]) * g_t
        x = mu[t] * m + (1 - mu[t]) * g_t if nesterov else m
        gain = muon_gain(mu[t], nesterov=nesterov)
        lambda_t = decay
        if corrected:
            lambda_t = decay * (gamma[t] / peak) * gain / muon_gain(start, nesterov=nesterov)
        if C2:
            lambda_t = gamma[t] * gain / (2 * C2[t])
        theta = theta - gamma[t] * (lambda_t * theta + muon_update(x, lmo, adjust, blocks))
        out.append(theta)
    return out


# --- LionC


def lion_gain(b1: float, b2: float) -> float:
    """Return 1 + 2 sum_k (2/pi) asin(kappa b2^k), lag by lag."""
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
    """Train by Lion with lambda_t = lambda (gamma_t / gamma_peak) G(betas_t) / G(start), or with the given lambda_t."""
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
    """Train by momentum SGD, lambda_t = lambda gamma_t / gamma_peak; trace times (start / alpha_t)^2, mu = 1 - alpha.

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


# --- holding the norm (theory, sections 6 and 7)


class Held:
    """One parameter whose norm is held: "balance" or "fixed"; `waiting` says which rows have no gradient."""

    def __init__(self, kind: str, target: float | None, T: float = 20.0):
        self.kind, self.target, self.T = kind, target, T
        self.A: float | None = None
        self.B = 0.0

    def step(self, theta: Tensor, u: Tensor, gamma: float, moves: Tensor) -> Tensor:
        """theta after one step with update u; `moves` is 1 where weights take part in it, and 0 elsewhere."""
        before = float((theta * theta).sum())
        decayed = float((moves * theta * theta).sum())
        along, length = float((moves * theta * u).sum()), float((moves * u * u).sum())
        share = decayed / before if before > 0 else 1.0
        if self.kind == "fixed":
            if self.target is None:
                self.target = before
            free = moves * (theta - gamma * u)
            scale = math.sqrt(self.target * share / float((free * free).sum()))
            return torch.where(moves > 0, scale * free, theta)
        assert self.target is not None
        if length > 0:
            new = length / share, along / share
            weight = 1.0 if self.A is None else 1 / max(1.0, self.T / 10)
            A = 0.0 if self.A is None else self.A
            self.A, self.B = A + weight * (new[0] - A), self.B + weight * (new[1] - self.B)
        drift = (gamma**2 * (self.A or 0.0) - 2 * gamma * self.B) / (2 * self.target) if length > 0 else 0.0
        error = min(1.0, max(-1.0, before / self.target - 1))
        eta = min(0.5, max(-0.1, drift + error / (2 * self.T)))
        return theta - moves * (eta * theta + gamma * u)
