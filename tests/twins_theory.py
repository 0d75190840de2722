"""Slow twins of steadynorm.theory, in the paper's notation.

Nothing here is compressed or recursive in the modes: the overlap kernels are closed forms or plain integrals, gains are
sums over the lag k, and a forecast is a double sum over all pairs of past updates, whose correlation comes from writing
every input out as a combination of the gradients, x_t = sum_s W_ts g_s. Quadrature nodes and modes are made when a kernel
is first evaluated, not when tests are collected.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np

Floats = np.ndarray
F = Callable[[Floats], Floats]


# --- overlap kernels f(r), r an array in [0, 1]


def f_linear(r: Floats) -> Floats:
    return np.asarray(r, float)


def f_sign(r: Floats) -> Floats:
    """Return the overlap by Grothendieck's identity."""
    return 2 / math.pi * np.arcsin(r)


@cache
def legendre_nodes() -> tuple[Floats, Floats]:
    return np.polynomial.legendre.leggauss(300)


def f_vector(d: int) -> F:
    """f = lead r 2F1(1/2, 1/2; d/2+1; r^2), the hypergeometric function by Euler's integral with t = sin^2 x:

    2F1 = 2 / B(1/2, (d+1)/2) * integral_0^{pi/2} cos(x)^d / sqrt(1 - r^2 sin(x)^2) dx
    """
    # (E|g|)^2 / d of a Gaussian d-vector g: how much of an update is linear in its input
    lead = 2 / d * math.exp(2 * (math.lgamma((d + 1) / 2) - math.lgamma(d / 2)))
    beta = math.sqrt(math.pi) * math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2 + 1))

    def f(r: Floats) -> Floats:
        y, w = legendre_nodes()
        x = (y + 1) * math.pi / 4
        weight = math.pi / 2 * w * np.cos(x) ** d
        r = np.asarray(r, float)
        out = np.empty(r.size)
        for low in range(0, r.size, 4096):  # only to bound memory
            part = r.ravel()[low : low + 4096, None]
            out[low : low + 4096] = (weight / np.sqrt(1 - (part * np.sin(x)) ** 2)).sum(1)
        return lead / beta * r * out.reshape(r.shape)

    return f


def f_square(r: Floats) -> Floats:
    """(4/pi^2) sum over odd n of (1/n + 1/(n+2))^2 r^n, summed in closed form with Legendre's chi_2.

    f = (4/pi^2) ((1 + 1/r^2) chi_2(r) + (1 - 1/r^2) artanh r),  chi_2(r) = sum over odd n of r^n / n^2;
    chi_2((1-r)/(1+r)) + chi_2(r) = pi^2/8 + ln(r) ln((1+r)/(1-r)) / 2 makes the series short near 1.
    """
    r = np.asarray(r, float)
    n = np.arange(1, 100, 2)
    low = np.minimum(r, 0.45)  # 0.45^99 is nothing
    series = 4 / math.pi**2 * ((1 / n + 1 / (n + 2)) ** 2 * low[..., None] ** n).sum(-1)
    high = np.clip(r, 0.4, 1 - 1e-16)
    x = (1 - high) / (1 + high)
    chi = math.pi**2 / 8 - np.log(high) * np.log(x) / 2 - (x[..., None] ** n / n**2).sum(-1)
    closed = 4 / math.pi**2 * ((1 + high**-2) * chi + (1 - high**-2) * np.arctanh(high))
    return np.where(r < 0.42, series, np.where(r < 1, closed, 1.0))


@cache
def spectral_modes(c: float, size: int = 800) -> tuple[Floats, Floats]:
    """a_n = (integral of sign(x) P_n(x))^2 = (sign(J)_{0n})^2, J the Jacobi matrix 1, sqrt(c), 1, sqrt(c), ...

    J is multiplication by x in the orthonormal polynomials P_n of the symmetrised singular-value law, so the matrix
    function sign(J) is the polar factor itself. Needs a gap at 0: c well below 1.
    """
    links = np.where(np.arange(size - 1) % 2 == 0, 1.0, math.sqrt(c))
    values, vectors = np.linalg.eigh(np.diag(links, 1) + np.diag(links, -1))
    row = (vectors[0] * np.sign(values)) @ vectors.T
    return np.arange(1, size, 2), row[1::2] ** 2


def f_spectral(c: float) -> F:
    def f(r: Floats) -> Floats:
        modes = zip(*spectral_modes(c), strict=True)
        return sum(weight * np.asarray(r, float) ** power for power, weight in modes if weight > 1e-24)

    return f


# --- steady state: sums over the lag k


def kappa(alpha: float, nesterov: bool) -> float:
    a = alpha
    return (1 - 2 * a**2 + a**3) / (1 + 4 * a - 6 * a**2 + 2 * a**3) if nesterov else 1.0


def lags(ratio: float, eta: float) -> Floats:
    """Return k = 1, 2, ... until (1-eta)^k ratio^k is negligible."""
    q = (1 - eta) * ratio
    return np.arange(1, 2 + (math.ceil(math.log(1e-22) / math.log(q)) if q > 0 else 1))


def gain(f: F, alpha: float, nesterov: bool, eta: float) -> float:
    """Return G = 1 + 2 sum_k (1-eta)^k f(kappa (1-alpha)^k)."""
    k = lags(1 - alpha, eta)
    return 1 + 2 * math.fsum((1 - eta) ** k * f(kappa(alpha, nesterov) * (1 - alpha) ** k))


def lion_correlation(beta1: float, beta2: float, count: int) -> Floats:
    """Return corr(x_{t-k}, x_t), k = 0 .. count-1, from x_t = (1-b1) g_t + b1 (1-b2) sum_j b2^j g_{t-1-j}."""
    j = np.arange(math.ceil(math.log(1e-18) / math.log(beta2)) + count)
    w = np.concatenate(([1 - beta1], beta1 * (1 - beta2) * beta2**j))
    return np.array([w[: len(w) - k] @ w[k:] for k in range(count)]) / (w @ w)


def lion_gain(beta1: float, beta2: float, eta: float) -> float:
    k = lags(beta2, eta)
    return 1 + 2 * math.fsum((1 - eta) ** k * f_sign(lion_correlation(beta1, beta2, len(k) + 1)[1:]))


def steady_norm_sq(lr: float, weight_decay: float, gain: float) -> float:
    eta = lr * weight_decay
    return lr**2 / (2 * eta - eta**2) * gain


# --- forecast: W_ts, the weight of gradient s in the input of update t


def ema_weights(alpha: Floats, *, nesterov: bool = False, warm: bool = False) -> Floats:
    """m = (1-alpha) m + alpha g; x = m or (1-alpha) m + alpha g. warm: m_0 is a gradient, in the last column."""
    T = len(alpha)
    g = np.eye(T, T + 1)
    m = np.eye(T + 1)[T] if warm else np.zeros(T + 1)
    W = np.empty((T, T + 1))
    for t, a in enumerate(alpha):
        m = (1 - a) * m + a * g[t]
        W[t] = (1 - a) * m + a * g[t] if nesterov else m
    return W


def trace_weights(mu: Floats, *, nesterov: bool = False) -> Floats:
    """m = mu m + g; x = m or mu m + g."""
    T = len(mu)
    g, m, W = np.eye(T), np.zeros(T), np.empty((T, T))
    for t, v in enumerate(mu):
        m = v * m + g[t]
        W[t] = v * m + g[t] if nesterov else m
    return W


def lion_weights(beta1: Floats, beta2: Floats) -> Floats:
    """x = b1 m + (1-b1) g, then m = b2 m + (1-b2) g."""
    T = len(beta1)
    g, m, W = np.eye(T), np.zeros(T), np.empty((T, T))
    for t, (b1, b2) in enumerate(zip(beta1, beta2, strict=True)):
        W[t] = b1 * m + (1 - b1) * g[t]
        m = b2 * m + (1 - b2) * g[t]
    return W


def adam_weights(beta1: Floats) -> Floats:
    """m = b1 m + (1-b1) g; u = m / (1 - b1^t), the second moment being 1."""
    W = ema_weights(1 - beta1)
    return W / (1 - beta1 ** np.arange(1, len(beta1) + 1))[:, None]


def overlaps(W: Floats, f: F) -> Floats:
    """E<u_s, u_t> / |u|^2 of normalised updates: f of the correlation of their inputs."""
    x = W / np.linalg.norm(W, axis=1, keepdims=True)
    r = np.minimum(x @ x.T, 1.0)
    np.fill_diagonal(r, 1.0)
    out = f(r)
    np.fill_diagonal(out, 1.0)
    return out


def contributions(lr: Floats, weight_decay: Floats, T: int) -> Floats:
    """theta_T = (decays) theta_0 - sum_{s<T} c_s u_s: c_s = gamma_s prod_{s < j < T} (1 - eta_j)."""
    keep = 1 - lr[:T] * weight_decay[:T]
    return lr[:T] * np.array([math.prod(keep[s + 1 :]) for s in range(T)])


def norm_sq_at(T: int, lr: Floats, weight_decay: Floats, S: Floats, start: float = 0.0) -> float:
    """E|theta_T|^2 / |u|^2 = prod (1-eta)^2 start + sum_{s,t} c_s c_t S_st."""
    c = contributions(lr, weight_decay, T)
    return float(np.prod(1 - lr[:T] * weight_decay[:T]) ** 2 * start + c @ S[:T, :T] @ c)


def norms_sq(lr: Floats, weight_decay: Floats, S: Floats, start: float = 0.0) -> Floats:
    return np.array([norm_sq_at(T, lr, weight_decay, S, start) for T in range(1, len(lr) + 1)])


def alignments(lr: Floats, weight_decay: Floats, S: Floats, start: float = 0.0) -> Floats:
    """E<theta_{t-1}, u_t> / (|theta_{t-1}| |u|) = - sum_{s<t} c_s S_st / sqrt(N_{t-1})."""
    out = np.zeros(len(lr))
    for t in range(1, len(lr)):
        c = contributions(lr, weight_decay, t)
        out[t] = -c @ S[:t, t] / math.sqrt(norm_sq_at(t, lr, weight_decay, S, start))
    return out


# --- cautious decay


def cautious_norm_sq(eta: float, alpha: float, f: F, nesterov: bool, *, signs: bool) -> float:
    """sigma^2 / gamma^2 under cautious decay by iterating the balance of one step, with expectations as integrals.

    In polar coordinates theta = sigma r cos(phi) and x = r (-c cos(phi) + sqrt(1-c^2) sin(phi)); u is x or sign x.
    """
    a, k = alpha, np.arange(1, 2000)
    kappa = (1 - 2 * a**2 + a**3) / (1 + 4 * a - 6 * a**2 + 2 * a**3) if nesterov else 1.0
    lags = float(np.sum((1 - eta / 2) ** (k - 1) * f(kappa * (1 - a) ** k)))
    nodes, weights = np.polynomial.legendre.leggauss(40)

    def mean(low: float, high: float, value: Callable[[Floats, Floats], Floats], c: float) -> float:
        """Average over the angles low..high and their opposites; the radius has E r^2 = 2."""
        phi = low + (high - low) * (nodes + 1) / 2
        z = np.cos(phi)
        return float(weights @ value(z, -c * z + math.sqrt(1 - c * c) * np.sin(phi))) * (high - low) / math.pi

    sigma, cross = math.sqrt((1 + 2 * lags) / eta), 0.0
    for _ in range(500):
        c = cross / sigma * (math.sqrt(math.pi / 2) if signs else 1.0)
        flip, quarter = math.asin(c), math.pi / 2  # where x and theta change sign
        if signs:
            theta_u = sigma * math.sqrt(2 / math.pi)
        else:  # E|theta u|
            product = [
                mean(low, high, lambda z, x: np.abs(z * x), c) for low, high in ((-quarter, flip), (flip, quarter))
            ]
            theta_u = sigma * sum(product)
        removed = (2 * eta - eta**2) * mean(flip, quarter, lambda z, x: z * z, c)  # of sigma^2
        added = 1 + 2 * cross + eta * (theta_u - cross)
        old, sigma, cross = sigma, math.sqrt(added / removed), (1 + eta / 2 * theta_u) * lags
        sigma = math.sqrt(old * sigma)  # damped
        if abs(sigma / old - 1) < 1e-13:
            break
    return sigma**2
