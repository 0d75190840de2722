"""timm: our optimizers by name in its `create_optimizer_v2`.

register()
create_optimizer_v2(model, opt="steadyscionc", param_group_fn=partial(param_groups, lr=0.01))
create_optimizer_v2(model, opt="steadylionc", lr=1e-4, weight_decay=1.0)        # timm's own groups
"""

from collections.abc import Callable
from typing import Any

from timm.optim import OptimInfo  # pyright: ignore[reportMissingImports]
from timm.optim._optim_factory import default_registry  # pyright: ignore[reportMissingImports]
from torch.optim import Optimizer

from steadynorm.optim import SGDC, AdamC, LionC, RenormalizedAdamW, Scion, ScionC

# timm has an "adamc", "lionc", "sgdc" of its own: one peak for all groups, not saved.
NAMES: dict[str, type[Optimizer]] = {
    "steadyscion": Scion,
    "steadyscionc": ScionC,
    "steadyadamc": AdamC,
    "steadylionc": LionC,
    "steadysgdc": SGDC,
    "steadyrenormalizedadamw": RenormalizedAdamW,
}


def register() -> None:
    """Make the names above known to timm; a second call changes nothing."""
    for name, cls in NAMES.items():
        if name not in default_registry.list_optimizers():
            betas = cls in (AdamC, LionC, RenormalizedAdamW)
            info = OptimInfo(
                name,
                _maker(cls),  # pyright: ignore[reportArgumentType]
                f"steadynorm's {cls.__name__}",
                has_eps=cls in (AdamC, RenormalizedAdamW),
                has_betas=betas,
            )
            default_registry.register(info)


def _with_own_peak(group: Any, lr: float | None) -> Any:
    """With layer decay timm's schedulers multiply a group's lr by its `lr_scale`: that is its peak."""
    lr = group.get("lr", lr) if isinstance(group, dict) else None
    return group if lr is None or "lr_scale" not in group else {"peak_lr": lr * group["lr_scale"], **group}


def _maker(cls: type[Optimizer]) -> Callable[..., Optimizer]:
    """timm passes one lr and one decay beside the groups, which is a trap where the groups have their own."""

    def make(params: Any, lr: float | None = None, **settings: Any) -> Optimizer:
        groups = list(params)
        own = {group["lr"] for group in groups if isinstance(group, dict) and "lr" in group}
        if lr is not None and own and lr not in own:
            raise ValueError(
                f"create_optimizer: lr={lr:g} would not be used, the groups have {', '.join(f'{each:g}' for each in own)}; "
                "pass it to the groups: param_group_fn=partial(steadynorm.param_groups, lr=...)"
            )
        if cls in (AdamC, LionC, SGDC):
            groups = [_with_own_peak(group, lr) for group in groups]
        return cls(groups, **settings) if lr is None else cls(groups, lr=lr, **settings)  # pyright: ignore[reportCallIssue]

    make.__name__ = cls.__name__
    return make
