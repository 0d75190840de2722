"""Overlap kernels: how much two unit updates overlap when their inputs have correlation r.

An LMO is not linear, so its outputs overlap less than its inputs do. For Gaussian inputs with correlation r the
expected overlap is f(r) = sum_n a_n r^n, with a_n >= 0, sum a_n = 1 and odd n only. The paper assumes f(r) = r. The
series is stored in compressed form: the first modes unchanged, later ones as Gauss quadrature nodes of the measure a_n
on geometric bins of n, so that about 160 terms represent a million.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from steadynorm.theory.momentum import Correlation, check_alpha, ema, steady_correlation

Floats: TypeAlias = np.ndarray

GAUSSIAN_MEAN_ABS = math.sqrt(2 / math.pi)  # E|z| of a standard normal z

_LAST_MODE = 1 << 20  # (1 - alpha)^n is below 1e-45 there for every alpha >= 1e-4
_EXACT_MODES = 40  # odd n = 1, 3, ..., 79 are stored unchanged
_BIN_RATIO = 1.25
_NODES_PER_BIN = 3


@dataclass(frozen=True, eq=False)
class Overlap:
    """The kernel f(r) = sum_n a_n r^n of one lmo and shape.

    Attributes:
        name: What the kernel depends on; kernels of the same name are equal.
        n: The exponents; not all are whole after compression.
        a: The weights, which sum to 1.
        closed: f in closed form, if there is one.
        mean_abs: E|u_i| of the elements of an update with E u_i^2 = 1; elements of long updates are nearly Gaussian.
        spread: E|u_i|^3 / E|u_i| - 1: 1 for Gaussian elements, 0 for signs.

    Examples:
        >>> f = vector_kernel(1)  # of the sign
        >>> round(f(0.5), 6)  # (2/pi) asin(1/2)
        0.333333
        >>> round(f.gain(0.1), 3) < 19.0  # the linear kernel has (2 - alpha)/alpha = 19
        True
    """

    name: str
    n: Floats = field(repr=False)
    a: Floats = field(repr=False)
    closed: Callable[[float], float] | None = field(default=None, repr=False)
    mean_abs: float = field(default=GAUSSIAN_MEAN_ABS, repr=False)
    spread: float = field(default=1.0, repr=False)

    def __call__(self, r: float) -> float:
        """Return the expected overlap of two unit updates whose inputs have correlation r."""
        if not -1 <= r <= 1:
            raise ValueError(f"overlap {self.name}: correlation r={r} is outside [-1, 1]")
        if self.closed is not None:
            return self.closed(r)
        return math.copysign(float(self.a @ np.abs(r) ** self.n), r)

    def gain(self, alpha: float, *, nesterov: bool = False, eta: float = 0.0) -> float:
        """Return G = 1 + 2 sum_{k>=1} (1-eta)^k f(r_k) for momentum with weight alpha on the new gradient.

        Examples:
            >>> round(LINEAR.gain(0.1), 12)
            19.0
        """
        return self.gain_of(steady_correlation(ema(check_alpha(alpha), nesterov=nesterov)), float(eta))

    def gain_of(self, correlation: Correlation, eta: float = 0.0) -> float:
        """Return G for any momentum: 1 + 2 (1-eta) sum_n a_n first^n / (1 - q_n) with q_n = (1-eta) ratio^n."""
        first, ratio, first_gap, ratio_gap = correlation
        if first <= 0.0 or eta >= 1.0:
            return 1.0
        with np.errstate(over="ignore"):  # infinite where alpha is almost 0
            return float(sum_gain(self.n, self.a, _log(first, first_gap), _log(ratio, ratio_gap), eta))


def sum_gain(n: Any, a: Any, log_first: Any, log_ratio: Any, eta: Any, numbers: Any = np) -> Any:
    """Return 1 + 2 (1-eta) sum_n a_n first^n / (1 - q_n) with q_n = (1-eta) ratio^n, unchecked.

    Args:
        n: The exponents.
        a: The weights.
        log_first: The logarithm of the correlation of successive inputs.
        log_ratio: The logarithm of the factor from one lag to the next.
        eta: lr times decay.
        numbers: The library that computes: numpy, or `jax.numpy` for values that JAX traces.
    """
    log_q = numbers.log1p(-eta) + n * log_ratio
    terms = a * numbers.exp(n * log_first) / -numbers.expm1(log_q)
    return 1.0 + 2.0 * (1.0 - eta) * terms.sum()


def _log(value: float, gap: float) -> float:
    """Return log(value) for value = 1 - gap in [0, 1], from whichever of the two is more precise."""
    if value < 0.5:
        return math.log(value) if value > 0 else -math.inf
    return math.log1p(-gap)


@functools.lru_cache(maxsize=256)
def vector_kernel(d: int) -> Overlap:
    """Return the kernel of a normalised Gaussian d-vector: f(r) = r (2/d) (Gamma((d+1)/2)/Gamma(d/2))^2 2F1(1/2, 1/2; d/2+1; r^2).

    d = 1 is the sign of a Gaussian: (2/pi) asin r. Direction and length of x are independent, so x_i = u_i |x| / sqrt(d)
    gives E|u_i| = sqrt(2/pi) / sqrt(a_1) and E|u_i|^3 = 2d/(d+1) E|u_i|.
    """
    d = max(d, 1)
    lead = 2 / d * math.exp(2 * (math.lgamma((d + 1) / 2) - math.lgamma(d / 2)))
    k = np.arange(_LAST_MODE // 2, dtype=np.float64)
    ratio = (k + 0.5) ** 2 / ((k + d / 2 + 1) * (k + 1))  # of successive coefficients
    a = lead * np.concatenate(([1.0], np.exp(np.cumsum(np.log(ratio[:-1])))))
    name, closed = (f"vector({d})", None) if d > 1 else ("sign", _arcsine)
    return Overlap(name, *_compress(a), closed, GAUSSIAN_MEAN_ABS / math.sqrt(lead), (d - 1) / (d + 1))


def _arcsine(r: float) -> float:
    return 2 / math.pi * math.asin(r)


def spectral_kernel(rows: int, columns: int) -> Overlap:
    """Return the kernel of the polar factor of a large Gaussian matrix; of one row or column, that of a vector."""
    small, large = sorted((rows, columns))
    common = math.gcd(small, large)
    return vector_kernel(large) if small <= 1 else _polar_kernel(small // common, large // common)


@functools.lru_cache(maxsize=256)
def _polar_kernel(small: int, large: int) -> Overlap:
    """Return the kernel of a polar factor; only the ratio c = small/large of the sides matters.

    With sigma(phi) = sqrt(1 + c + 2 sqrt(c) cos phi) the orthonormal polynomials of the symmetrised
    Marchenko-Pastur law are P_{2k+1} = sigma U_k(cos phi), so

        a_{2k+1} = ((2/pi) integral_0^pi sin((k+1) phi) sin(phi) / sigma(phi) dphi)^2

    are squared Fourier sine coefficients, which one FFT gives. For a square matrix a_n = (4/pi^2) (1/n + 1/(n+2))^2.
    """
    name, c = f"spectral({small}:{large})", small / large
    if 1 - c < 1e-5:
        n = 2.0 * np.arange(_LAST_MODE // 2) + 1
        return Overlap(name, *_compress(4 / math.pi**2 * (1 / n + 1 / (n + 2)) ** 2))
    # The coefficients fall as sqrt(c)^k, so a grid this fine leaves no aliasing.
    grid = 1 << min(20, max(10, math.ceil(math.log2(80 / (1 - math.sqrt(c))))))
    phi = 2 * np.pi * np.arange(grid) / grid
    sine = np.sin(phi) / np.sqrt(1 + c + 2 * math.sqrt(c) * np.cos(phi))
    coefficient = -2 / grid * np.fft.rfft(sine).imag[1:-1]
    return Overlap(name, *_compress(coefficient**2))


@functools.lru_cache(maxsize=256)
def mean_kernel(kernels: tuple[Overlap, ...], weights: tuple[float, ...]) -> Overlap:
    """Return the kernel of a parameter made of independent blocks: the mean of theirs, weighted by their U^2.

        f(r) = sum_b U_b^2 f_b(r) / sum_b U_b^2

    because inner products of updates are sums over blocks. Weights of a block are as large as its updates, so E|u_i|
    is weighted in the same way.

    Examples:
        >>> round(mean_kernel((vector_kernel(1), LINEAR), (3.0, 1.0))(0.5), 6)  # 3/4 of 1/3 and 1/4 of 1/2
        0.375
    """
    if len({kernel.name for kernel in kernels}) == 1:
        return kernels[0]
    shares = [weight / math.fsum(weights) for weight in weights]
    n = np.concatenate([kernel.n for kernel in kernels])
    a = np.concatenate([share * kernel.a for share, kernel in zip(shares, kernels, strict=True)])
    sizes = [share * kernel.mean_abs for share, kernel in zip(shares, kernels, strict=True)]
    spread = sum(size * kernel.spread for size, kernel in zip(sizes, kernels, strict=True)) / sum(sizes)
    name = " + ".join(f"{share:.12g} {kernel.name}" for share, kernel in zip(shares, kernels, strict=True))
    return Overlap(name, n, a, None, sum(sizes), spread)


def _compress(a: Floats) -> tuple[Floats, Floats]:
    """Return exponents and weights of about 160 terms that represent the weights a of n = 1, 3, 5, ...; mass is kept."""
    n = 2.0 * np.arange(len(a)) + 1
    nodes, weights = list(n[:_EXACT_MODES]), list(a[:_EXACT_MODES])
    low = _EXACT_MODES
    while low < len(a):
        high = min(len(a), max(low + _NODES_PER_BIN, int(low * _BIN_RATIO)))
        if a[low:high].sum() > 1e-18:
            bin_nodes, bin_weights = _gauss(n[low:high], a[low:high])
            nodes.extend(bin_nodes)
            weights.extend(bin_weights)
        low = high
    weights[-1] += max(0.0, 1.0 - math.fsum(weights))  # the tail past the last mode
    return np.array(nodes), np.array(weights)


def _gauss(x: Floats, mass: Floats) -> tuple[Floats, Floats]:
    """Return the Gauss quadrature of a discrete measure (Stieltjes recurrence, then the Jacobi matrix's eigenvalues)."""
    if len(x) <= _NODES_PER_BIN:
        return x, mass
    middle, half = (x[0] + x[-1]) / 2, (x[-1] - x[0]) / 2
    y, total = (x - middle) / half, mass.sum()
    density = mass / total
    diagonal, off = [], []
    before, now = np.zeros_like(y), np.ones_like(y)
    for _ in range(_NODES_PER_BIN):
        diagonal.append(float(density @ (y * now * now)))
        after = (y - diagonal[-1]) * now - (off[-1] if off else 0.0) * before
        off.append(math.sqrt(float(density @ (after * after))))
        before, now = now, after / off[-1]
    jacobi = np.diag(diagonal) + np.diag(off[:-1], 1) + np.diag(off[:-1], -1)
    place, vectors = np.linalg.eigh(jacobi)
    return middle + half * place, total * vectors[0] ** 2


LINEAR = Overlap("linear", np.array([1.0]), np.array([1.0]))
