"""Optimizers of other libraries, each where it can be imported; the reason is kept where it cannot."""

from collections.abc import Callable

import torch

from steadynorm.lab.bench import Contender


def _pytorch_optimizer() -> list[Contender]:
    from pytorch_optimizer import SCION, Muon
    from pytorch_optimizer.optimizer.scion import LMONorm
    from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5

    # Its ns_method="gram_newton_schulz" works in fp16, which this CPU lacks: 37 s a step on ViT-S/16, so not in the table.
    return [
        Contender(
            "pytorch_optimizer SCION",
            lambda p: SCION(p, lr=1e-3, norm_type=LMONorm.SPECTRAL),
            zero_power_via_newton_schulz_5,
        ),
        Contender(
            "pytorch_optimizer Muon",
            lambda p: Muon([{"params": p, "use_muon": True}], lr=1e-3),
            zero_power_via_newton_schulz_5,
        ),
    ]


def _heavyball() -> list[Contender]:
    import heavyball

    return [Contender("HeavyBall Muon", lambda p: heavyball.Muon(p, lr=1e-3, compile_step=False))]


def _timm() -> list[Contender]:
    from timm.optim import Muon  # needs torchvision, which has no build for the CPU torch used here

    return [Contender("timm Muon", lambda p: Muon(p, lr=1e-3))]


def peers() -> tuple[list[Contender], dict[str, str]]:
    """Those that take a step here, and why the others do not."""
    found: list[Contender] = []
    missing: dict[str, str] = {}
    loaders: dict[str, Callable[[], list[Contender]]] = {
        "pytorch_optimizer": _pytorch_optimizer,
        "HeavyBall": _heavyball,
        "timm": _timm,
    }
    for name, load in loaders.items():
        try:
            loaded = load()
            for each in loaded:
                p = torch.nn.Parameter(torch.randn(32, 64))
                p.grad = torch.randn_like(p)
                each.make([p]).step()
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"
        else:
            found += loaded
    return found, missing
