"""Our optimizers, described as torch describes its own: OptimizerInfo and OptimizerInput, for
tests/test_torch_harness.py.

`impls`: AdamC is torch's AdamW inside, so it has torch's implementations; the others have one, which stacks parameters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import SWALR
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

import steadynorm as sn

LR = 0.01
COMMON: tuple[dict[str, Any], ...] = ({}, {"lr": LR}, {"lr": torch.tensor(LR)}, {"lr": LR, "maximize": True})
SCION = ({"alpha": 1.0}, {"nesterov": True}, {"polar": "svd"}, {"momentum_dtype": "bfloat16"})
INPUTS: dict[str, tuple[dict[str, Any], ...]] = {
    "Scion": (*SCION, {"weight_decay": 0.1}),
    "ScionC": (*SCION, {"overlap": "exact"}, {"steady_norm_sq": 2.0, "alpha": 0.5}),
    "AdamC": ({"weight_decay": 0.0}, {"amsgrad": True}, {"betas": (0.5, 0.9)}, {"steady_norm_sq": 0.5}),
    "CorrectedAdamW": (
        {"weight_decay": 0.0},
        {"weight_decay": 0.1, "lr": LR},
        {"amsgrad": True},
        {"betas": (0.5, 0.9)},
    ),
    "LionC": ({"weight_decay": 0.0}, {"betas": (0.5, 0.9)}, {"steady_norm_sq": 0.5}),
    "SGDC": ({"weight_decay": 0.0}, {"nesterov": True}, {"trace": True, "alpha": 0.5, "lr": 1e-3}),
    "RenormalizedAdamW": ({"weight_decay": 0.0}, {"betas": (0.5, 0.9)}, {"eps": 1e-6}),
    "MuonC": (
        {"weight_decay": 0.0},
        {"momentum": 0.5, "nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw", "lr": 1e-3},
        {"betas": (0.5, 0.9), "adam_lr": 1e-3},
        {"steady_norm_sq": 2.0},
        {"momentum_dtype": "bfloat16"},
        {"polar": "newton-schulz"},
    ),
}
NEEDS = {
    "Scion": {"lmo": "by-shape"},
    "ScionC": {"lmo": "by-shape"},
    "MuonC": {"adam_lr": LR},
}  # what a constructor must be told
ERRORS: dict[str, tuple[tuple[dict[str, Any], type[Exception], str], ...]] = {
    "Scion": (({"alpha": 0.0}, ValueError, r"alpha=0.0"), ({"lmo": "spectrum"}, ValueError, r"unknown lmo"), ({"lmo": None}, ValueError, r"no lmo"),
              ({"polar": "exact"}, ValueError, r"polar='exact'"), ({"blocks": 7}, ValueError, r"blocks=7"),
              ({"momentum_dtype": "float8"}, ValueError, r"momentum_dtype")),
    "ScionC": (({"steady_norm_sq": 0.0}, ValueError, r"steady_norm_sq=0"), ({"overlap": "none"}, ValueError, r"overlap='none'"),
               ({"lr": 1.0, "alpha": 0.01}, ValueError, r"unreachable")),
    "AdamC": (({"betas": (1.0, 0.0)}, ValueError, r"Invalid beta parameter at index 0: 1.0"), ({"peak_lr": 0.0}, ValueError, r"peak_lr=0"),
              ({"lr": torch.tensor(LR), "foreach": True}, ValueError, r"lr as a Tensor is not supported"),
              ({"foreach": True, "fused": True}, RuntimeError, r"`fused` and `foreach` cannot be `True` together")),
    "LionC": (({"betas": (1.0, 0.0)}, ValueError, r"betas\[0\]=1.0"), ({"betas": (0.9,)}, ValueError, r"two numbers"), ({"steady_norm_sq": -1.0}, ValueError, r"steady_norm_sq=-1")),
    "SGDC": (({"alpha": 1.5}, ValueError, r"alpha=1.5"), ({"peak_lr": -1.0}, ValueError, r"peak_lr=-1")),
    "MuonC": (({"betas": (1.0, 0.0)}, ValueError, r"betas\[0\]=1.0"), ({"momentum": 1.0}, ValueError, r"momentum=1.0 is outside"),
              ({"adjust_lr_fn": "none"}, ValueError, r"adjust_lr_fn='none'"), ({"polar": "exact"}, ValueError, r"polar='exact'"),
              ({"blocks": 7}, ValueError, r"blocks=7"), ({"momentum_dtype": "float8"}, ValueError, r"momentum_dtype")),
    "RenormalizedAdamW": (({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\]=1.0"), ({"eps": -1.0}, ValueError, r"eps=-1"), ({"betas": (0.9,)}, ValueError, r"two numbers")),
}  # fmt: skip
ALL_ERRORS: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"lr": -1.0}, ValueError, r"lr=-1|Invalid learning rate"),
    ({"lr": float("nan")}, ValueError, r"lr=nan|Invalid learning rate"),
    ({"weight_decay": -1.0}, ValueError, r"weight_decay=-1|Invalid weight_decay"),
    ({"learning_rate": 0.9}, TypeError, r"unexpected keyword argument 'learning_rate'"),
)
NO_MOMENTUM = ({"momentum": 0.9}, TypeError, r"has no momentum=.*alpha")  # MuonC has torch's word for it


def inputs(name: str, device: Any = "cpu", dtype: Any = None) -> list[OptimizerInput]:
    """Return the settings to run every test with."""
    found = []
    for kwargs in (*COMMON, *INPUTS[name]):
        fresh = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
        found.append(OptimizerInput(params=None, kwargs=NEEDS.get(name, {}) | fresh, desc=str(kwargs)))
    return found


def error_inputs(name: str, device: Any = "cpu", dtype: Any = torch.float32) -> list[ErrorOptimizerInput]:
    """Return torch's own error inputs for all optimizers, and ours."""
    found = get_error_inputs_for_all_optims(device, dtype)
    for each in found:
        each.optimizer_error_input.kwargs = NEEDS.get(name, {}) | each.optimizer_error_input.kwargs
    refused = () if name == "MuonC" else (NO_MOMENTUM,)
    for kwargs, kind, regex in (*ALL_ERRORS, *refused, *ERRORS[name]):
        given = OptimizerInput(params=None, kwargs=NEEDS.get(name, {}) | kwargs, desc=str(kwargs))
        found.append(ErrorOptimizerInput(given, error_type=kind, error_regex=regex))
    one = torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))
    one.grad = torch.ones_like(one).to_sparse()
    sparse = OptimizerInput(params=[one], kwargs=dict(NEEDS.get(name, {})), desc="a sparse gradient")
    step = OptimizerErrorEnum.STEP_ERROR
    found.append(ErrorOptimizerInput(sparse, error_on=step, error_type=ValueError, error_regex=r"group 0.*sparse"))
    return found


def CorrectedAdamW(params: Any, **kwargs: Any) -> torch.optim.Optimizer:  # noqa: N802
    """torch's AdamW with `correct`, as if it were a class."""
    return sn.correct(torch.optim.AdamW(params, **kwargs))


def info(cls: Callable[..., torch.optim.Optimizer]) -> OptimizerInfo:
    name = cls.__name__
    adam = name in ("AdamC", "CorrectedAdamW")
    return OptimizerInfo(
        cls,  # pyright: ignore[reportArgumentType]
        optim_inputs_func=partial(inputs, name),
        optim_error_inputs_func=partial(error_inputs, name),
        scheduler_inputs=(
            [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
            [lambda opt: ReduceLROnPlateau(opt)],
            [lambda opt: StepLR(opt, gamma=0.9, step_size=10), lambda opt: ReduceLROnPlateau(opt)],
            [lambda opt: LinearLR(opt, start_factor=0.4, total_iters=4)],
        ),
        supported_impls=("foreach", "fused") if adam else (),
        not_og_supported_flags=("maximize", "check_finite"),
        supports_complex=False,
        has_capturable_arg=False,  # refused: replaying would keep the decay of the captured step
        supports_fused_on=("cpu", "cuda") if adam else (),
    )


class MuonC(sn.MuonC):
    """MuonC for plain parameters: two groups, matrices by Muon and the rest by Adam; a group of matrices only is Muon's."""

    def __init__(self, params: Any, **kwargs: Any):
        params = list(params) if not isinstance(params, torch.Tensor | dict) else params
        if isinstance(params, list) and params and not isinstance(params[0], dict):
            by_kind = [[entry for entry in params if _is_matrix(entry) is kind] for kind in (True, False)]
            params = [{"params": entries} for entries in by_kind if entries]
        super().__init__(params, **kwargs)

    def add_param_group(self, param_group: Any) -> None:
        if isinstance(param_group, dict) and "use_muon" not in param_group:
            entries = param_group["params"]
            entries = [entries] if isinstance(entries, torch.Tensor) else entries
            param_group = {**param_group, "params": entries, "use_muon": all(map(_is_matrix, entries))}
        super().add_param_group(param_group)


def _is_matrix(entry: Any) -> bool:
    return getattr(entry[1] if isinstance(entry, tuple) else entry, "ndim", 0) > 1


CLASSES: dict[str, Any] = {"MuonC": MuonC}
OPTIM_DB = [info(CLASSES.get(name) or getattr(sn, name)) for name in INPUTS if name != "CorrectedAdamW"]
CORRECTED = info(CorrectedAdamW)

# Every scheduler of torch, each below the lr that the optimizer was made with.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: LambdaLR(opt, lambda t: 1 / (1 + t)),
    "MultiplicativeLR": lambda opt: MultiplicativeLR(opt, lambda t: 0.9),
    "StepLR": lambda opt: StepLR(opt, step_size=3, gamma=0.5),
    "MultiStepLR": lambda opt: MultiStepLR(opt, milestones=[2, 5], gamma=0.5),
    "ConstantLR": lambda opt: ConstantLR(opt, factor=0.5, total_iters=4),
    "LinearLR": lambda opt: LinearLR(opt, start_factor=0.3, total_iters=5),
    "ExponentialLR": lambda opt: ExponentialLR(opt, gamma=0.8),
    "PolynomialLR": lambda opt: PolynomialLR(opt, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda opt: CosineAnnealingLR(opt, T_max=8),
    "CosineAnnealingWarmRestarts": lambda opt: CosineAnnealingWarmRestarts(opt, T_0=3),
    "CyclicLR": lambda opt: CyclicLR(opt, base_lr=0.2 * LR, max_lr=LR, step_size_up=3, cycle_momentum=False),
    "OneCycleLR": lambda opt: OneCycleLR(opt, max_lr=LR, total_steps=12, cycle_momentum=False),
    "ReduceLROnPlateau": lambda opt: ReduceLROnPlateau(opt, patience=1, factor=0.5),
    "ChainedScheduler": lambda opt: ChainedScheduler([ConstantLR(opt, factor=0.5), ExponentialLR(opt, gamma=0.9)]),
    "SequentialLR": lambda opt: SequentialLR(
        opt, [LinearLR(opt, 0.2, 1.0, 3), ExponentialLR(opt, 0.8)], milestones=[3]
    ),
    "SWALR": lambda opt: SWALR(opt, swa_lr=0.3 * LR, anneal_epochs=5),
}
