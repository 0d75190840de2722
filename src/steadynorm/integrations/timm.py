"""timm: our optimizers by name in its `create_optimizer_v2`.

register()
create_optimizer_v2(model, opt="steadyscionc", param_group_fn=partial(param_groups, lr=0.01))
create_optimizer_v2(model, opt="steadylionc", lr=1e-4, weight_decay=1.0)        # timm's own groups
"""

import inspect
from collections.abc import Callable
from typing import Any

from timm.optim import OptimInfo  # pyright: ignore[reportMissingImports]
from timm.optim._optim_factory import default_registry  # pyright: ignore[reportMissingImports]
from torch.optim import Optimizer

from steadynorm.optim import SGDC, AdamC, LionC, RenormalizedAdamW, Scion, ScionC

# timm has its own "adamc", "lionc" and "sgdc", with one peak for all groups that is not saved.
NAMES: dict[str, type[Optimizer]] = {
    "steadyscion": Scion,
    "steadyscionc": ScionC,
    "steadyadamc": AdamC,
    "steadylionc": LionC,
    "steadysgdc": SGDC,
    "steadyrenormalizedadamw": RenormalizedAdamW,
}


def register() -> None:
    """Register the names above with timm; a second call changes nothing."""
    for name, cls in NAMES.items():
        if name not in default_registry.list_optimizers():
            betas = cls in (AdamC, LionC, RenormalizedAdamW)
            info = OptimInfo(
                name,
                _maker(cls),  # pyright: ignore[reportArgumentType]
                f"steadynorm's {cls.__name__}",
                has_eps=cls in (AdamC, RenormalizedAdamW),
                has_momentum=not betas,  # so that timm passes it on, and the optimizer can refuse it
                has_betas=betas,
            )
            default_registry.register(info)


def _with_own_peak(group: Any, lr: float) -> Any:
    """Set the peak of a group with layer decay, where timm's schedulers multiply lr by the group's `lr_scale`."""
    if not isinstance(group, dict) or "lr_scale" not in group:
        return group
    return {"peak_lr": group.get("lr", lr) * group["lr_scale"], **group}


def _maker(cls: type[Optimizer]) -> Callable[..., Optimizer]:
    """Return a constructor that refuses timm's lr if the groups have their own and would ignore it."""

    def make(params: Any, lr: float | None = None, **settings: Any) -> Optimizer:
        groups = list(params)
        own = {group["lr"] for group in groups if isinstance(group, dict) and "lr" in group}
        if lr is not None and own and lr not in own:
            raise ValueError(
                f"create_optimizer: lr={lr:g} would not be used, the groups have {', '.join(f'{value:g}' for value in own)}; "
                "pass it to the groups: param_group_fn=partial(steadynorm.param_groups, lr=...)"
            )
        # What timm passes if nobody asked: momentum 0.9, which is our alpha of 0.1, and no decay, which ScionC computes.
        if settings.get("momentum") == 0.9:
            del settings["momentum"]
        if cls is ScionC and settings.get("weight_decay") == 0:
            del settings["weight_decay"]
        if cls in (AdamC, LionC, SGDC):
            usual_lr = inspect.signature(cls).parameters["lr"].default
            groups = [_with_own_peak(group, usual_lr if lr is None else lr) for group in groups]
        return cls(groups, **settings) if lr is None else cls(groups, lr=lr, **settings)  # pyright: ignore[reportCallIssue]

    make.__name__ = cls.__name__
    return make
