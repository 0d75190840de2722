"""AdamC, LionC and MuonC: optax's own transformations, chained with corrected decay."""

from collections.abc import Mapping
from typing import Any

import optax  # pyright: ignore[reportMissingImports]

from steadynorm.jax.decay_schedule import Value, add_corrected_decay, corrected_decay, keep_dtypes


def adamc(
    learning_rate: Value,
    b1: Value = 0.9,
    b2: Value = 0.999,
    eps: float = 1e-8,
    weight_decay: Value | None = None,
    *,
    peak_lr: Value | None = None,
    steady_norm_sq: Value | None = None,
    mask: Any = None,
    mu_dtype: str | None = None,
    nesterov: bool = False,
) -> Any:
    """Return optax's AdamW with corrected decay.

        lambda_t = lambda gamma_t / gamma_peak,   or gamma_t / (2 steady_norm_sq)

    With a constant lr this is `optax.adamw`.

    Args:
        learning_rate: gamma: a number, a schedule or an array.
        b1, b2, eps, mu_dtype, nesterov: As in `optax.adamw`.
        weight_decay: lambda at the peak lr; 0.1 by default, not optax's 1e-4.
        peak_lr: The schedule's maximum; needed unless learning_rate is a number.
        steady_norm_sq: A target in place of weight_decay: the mean square of an element.
        mask: As in `optax.adamw`: True where weights decay. Mask the output layer, whose decay should be constant.

    Examples:
        >>> tx = adamc(optax.cosine_decay_schedule(1e-3, 100), weight_decay=0.1, peak_lr=1e-3)
    """
    return optax.chain(
        optax.scale_by_adam(b1, b2, eps, mu_dtype=mu_dtype, nesterov=nesterov),
        add_corrected_decay(
            learning_rate,
            _base(weight_decay, steady_norm_sq, 0.1),
            mask=mask,
            peak_lr=peak_lr,
            steady_norm_sq=steady_norm_sq,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )


def lionc(
    learning_rate: Value,
    b1: Value = 0.9,
    b2: Value = 0.99,
    weight_decay: Value | None = None,
    *,
    peak_lr: Value | None = None,
    steady_norm_sq: Value | None = None,
    reference_betas: tuple[Value, Value] | None = None,
    mask: Any = None,
    mu_dtype: str | None = None,
) -> Any:
    """Return optax's Lion with corrected decay.

        lambda_t = lambda (gamma_t / gamma_peak) G(betas_t)/G(betas_0),   or the decay that reaches `steady_norm_sq`

    Args:
        learning_rate: gamma: a number, a schedule or an array.
        b1, b2, mu_dtype: As in `optax.lion`.
        weight_decay: lambda at the peak lr; 1 by default.
        peak_lr: The schedule's maximum; needed unless learning_rate is a number.
        steady_norm_sq: A target in place of weight_decay: the mean square of an element.
        reference_betas: The betas at which weight_decay applies unchanged; needed if `optax.inject_hyperparams` changes
            them.
        mask: As in `optax.lion`.

    Examples:
        >>> tx = lionc(1e-4, weight_decay=1.0)
    """
    decay = add_corrected_decay(
        learning_rate,
        _base(weight_decay, steady_norm_sq, 1.0),
        family="lion",
        betas=(b1, b2),
        reference=reference_betas,
        mask=mask,
        peak_lr=peak_lr,
        steady_norm_sq=steady_norm_sq,
    )
    return optax.chain(optax.scale_by_lion(b1, b2, mu_dtype), decay, optax.scale_by_learning_rate(learning_rate))


def muonc(
    learning_rate: Value,
    weight_decay: Value | None = None,
    *,
    beta: Value = 0.95,
    nesterov: bool = True,
    peak_lr: Value | None = None,
    steady_norm_sq: Value | None = None,
    reference_beta: Value | None = None,
    adam_learning_rate: Value | None = None,
    adam_weight_decay: Value = 0.0,
    adam_peak_lr: Value | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return `optax.contrib.muon` with corrected decay, for its matrices and for its Adam.

        lambda_t = lambda (gamma_t / gamma_peak) G(beta_t)/G(beta_0),   or gamma_t G(beta_t) / (2 steady_norm_sq)

    Args:
        learning_rate: gamma of the matrices: a number, a schedule or an array.
        weight_decay: The lambda of the matrices at the peak lr; 0.1 by default.
        beta, nesterov: As in `optax.contrib.muon`.
        peak_lr: The schedule's maximum; needed unless learning_rate is a number.
        steady_norm_sq: A target in place of weight_decay: the squared weight norm over that of one update.
        reference_beta: The beta at which weight_decay applies unchanged; needed if `optax.inject_hyperparams` changes it.
        adam_learning_rate: As in `optax.contrib.muon`: the lr of everything else; learning_rate by default.
        adam_weight_decay: The lambda of that Adam at its peak lr.
        adam_peak_lr: The peak of adam_learning_rate; peak_lr by default if both use learning_rate.
        options: Further arguments of `optax.contrib.muon`, as in {"ns_steps": 4, "consistent_rms": 0.2}.

    Examples:
        >>> tx = muonc(optax.linear_schedule(0.02, 0.0, 100), 0.1, peak_lr=0.02)
    """
    own = {"learning_rate", "beta", "nesterov", "weight_decay", "adam_learning_rate", "adam_weight_decay"}
    if twice := own & set(options or {}):
        raise ValueError(f"muonc: options has {', '.join(sorted(twice))}; pass it to muonc itself")
    reference = None if reference_beta is None else 1 - reference_beta
    decay = corrected_decay(
        learning_rate,
        _base(weight_decay, steady_norm_sq, 0.1),
        family="muon",
        alpha=1 - beta,
        nesterov=nesterov,
        reference=reference,
        peak_lr=peak_lr,
        steady_norm_sq=steady_norm_sq,
    )
    adam_lr, adam_peak = (learning_rate, peak_lr) if adam_learning_rate is None else (adam_learning_rate, None)
    adam_peak = adam_peak if adam_peak_lr is None else adam_peak_lr
    is_zero = isinstance(adam_weight_decay, int | float) and adam_weight_decay == 0
    adam_decay = 0.0 if is_zero else corrected_decay(adam_lr, adam_weight_decay, peak_lr=adam_peak)
    muon = optax.contrib.muon(
        learning_rate,
        beta=beta,
        nesterov=nesterov,
        weight_decay=decay,
        adam_learning_rate=adam_learning_rate,
        adam_weight_decay=adam_decay,
        **(options or {}),
    )
    return keep_dtypes(muon)


def _base(weight_decay: Value | None, target: Value | None, default: float) -> Value | None:
    """Return the decay at the peak, which has a default unless a target is passed."""
    return default if weight_decay is None and target is None else weight_decay
