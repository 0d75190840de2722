"""The transformations end where torch's optimizers end, after 50 steps with everything moving."""

import needs_jax  # noqa: F401  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import steadynorm as sn
import steadynorm.jax as sj

STEPS, LR, ALPHA, TARGET = 50, 0.02, 0.1, 1.1875
RATIO = sn.schedule.cosine(STEPS, warmup=10)
ALPHAS = sn.schedule.linear_alpha(ALPHA, 0.5, STEPS)
TARGETS = sn.schedule.cosine_norm(TARGET, 0.8, STEPS)
# path: (shape as flax stores it, lmo, blocks) of arrays that are transposed for torch where they are kernels
TREE = {
    "Block_0/qkv/kernel": ((12, 36), "spectral", 3),
    "Block_0/up/kernel": ((12, 40), "spectral", 1),
    "Block_1/up/kernel": ((12, 40), "spectral", 1),
    "Block_1/down/kernel": ((40, 12), "spectral", 1),
    "Block_1/norm/scale": ((12,), "bias", 1),
    "columns/kernel": ((12, 10), "column", 1),
    "conv/kernel": ((3, 3, 2, 12), "spectral", 1),
    "embed/embedding": ((9, 12), "embedding", 1),
    "head/kernel": ((12, 7), "sign", 1),
    "head/bias": ((7,), "bias", 1),
    "rows/kernel": ((12, 10), "row", 1),
}
ROWS_AND_COLUMNS = {"rows/*": "row", "columns/*": "column"}  # no role has these lmos, so they are asked for


def lr_at(step: int) -> float:
    return LR * RATIO(step)


def draw(dtype: type, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {path: random.standard_normal(shape).astype(dtype) for path, (shape, _, _) in TREE.items()}


def gradients(dtype: type, step: int) -> dict[str, np.ndarray]:
    """Return random gradients; some rows of the embedding have none, and the vector gets none for a while."""
    grads = draw(dtype, 100 + step)
    grads["embed/embedding"][step % 9] = 0.0
    if 20 <= step < 30:
        grads["Block_1/norm/scale"][:] = 0.0
    return grads


def nest(flat: dict) -> dict:
    tree: dict = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return tree


def to_torch(path: str, x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(x.reshape(-1, x.shape[-1]).T if path.endswith("kernel") else x))


def run_torch(optimizer_of, dtype: type, before_step) -> dict[str, np.ndarray]:
    params = {path: torch.nn.Parameter(0.1 * to_torch(path, x)) for path, x in draw(dtype, 0).items()}
    optimizer = optimizer_of(params)
    for step in range(STEPS):
        for path, grad in gradients(dtype, step).items():
            params[path].grad = to_torch(path, grad)
        before_step(optimizer, step)
        optimizer.step()
    return {path: p.detach().numpy() for path, p in params.items()}


def run_jax(tx, dtype: type) -> dict[str, np.ndarray]:
    params = nest({path: jnp.asarray(x) * 0.1 for path, x in draw(dtype, 0).items()})
    state = tx.init(params)

    @jax.jit
    def advance(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(STEPS):
        grads = nest({path: jnp.asarray(x) for path, x in gradients(dtype, step).items()})
        params, state = advance(params, state, grads)
    leaves = {path: np.asarray(x) for path, x in sj.labels.path_leaves(params)}
    return {path: to_torch(path, leaves[path]).numpy() for path in TREE}


def assert_alike(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], dtype: type) -> None:
    assert {x.dtype for x in ours.values()} == {np.dtype(dtype)}
    worst = {path: np.abs(ours[path] - theirs[path]).max() for path in TREE}
    assert max(worst.values()) < (1e-10 if dtype is np.float64 else 1e-5), worst


def scion_groups(params: dict[str, torch.Tensor], **corrected) -> list[dict]:
    groups = []
    for path, (_, lmo, blocks) in TREE.items():
        rule = {"lr": 20 * LR, "weight_decay": 0.004, "steady_norm_sq": None} if lmo == "sign" else corrected
        groups.append({"params": [params[path]], "lmo": lmo, "blocks": blocks, **rule})
    return groups


def move_scion(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        is_output = group["lmo"] == "sign"
        group["lr"], group["alpha"] = lr_at(step) * (20 if is_output else 1), ALPHAS(step)
        if not is_output:
            group["steady_norm_sq"] = TARGETS(step)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("overlap", ["linear", "exact"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_scionc_equals_torchs_scionc(dtype, overlap, nesterov):
    with jax.enable_x64(dtype is np.float64):
        labels = sj.label_params(nest(draw(dtype, 0)), lmos=ROWS_AND_COLUMNS)
        assert {path: (label.lmo, label.blocks) for path, label in labels.items()} == {
            path: (lmo, blocks) for path, (_, lmo, blocks) in TREE.items()
        }
        tx = sj.scionc(
            sj.tabulate(lr_at, STEPS), labels, alpha=sj.tabulate(ALPHAS, STEPS), steady_norm_sq=sj.tabulate(TARGETS, STEPS),
            overlap=overlap, nesterov=nesterov, output_weight_decay=0.004, polar="svd",
        )  # fmt: skip
        ours = run_jax(tx, dtype)
    theirs = run_torch(
        lambda params: sn.ScionC(scion_groups(params), lr=LR, overlap=overlap, nesterov=nesterov, polar="svd"),
        dtype,
        move_scion,
    )
    assert_alike(ours, theirs, dtype)


@pytest.mark.parametrize("polar", ["express", "newton-schulz"])
def test_scion_equals_torchs_scion(polar):
    """In fp64 neither library rounds to bf16."""
    with jax.enable_x64(True):
        labels = sj.label_params(nest(draw(np.float64, 0)), lmos=ROWS_AND_COLUMNS)
        tx = sj.scion(sj.tabulate(lr_at, STEPS), labels, weight_decay=0.1, output_weight_decay=0.004, polar=(polar, 4))
        ours = run_jax(tx, np.float64)

    def move(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step) * (20 if group["lmo"] == "sign" else 1)

    def make(params: dict) -> torch.optim.Optimizer:
        groups = [{key: g[key] for key in g if key != "steady_norm_sq"} for g in scion_groups(params)]
        return sn.Scion(groups, lr=LR, weight_decay=0.1, polar=polar, polar_steps=4)

    assert_alike(ours, run_torch(make, np.float64, move), np.float64)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("target", [None, 0.3])
def test_adamc_equals_torchs_adamc(dtype, target):
    decay = 0.5 if target is None else None
    with jax.enable_x64(dtype is np.float64):
        peak = None if decay is None else LR
        tx = sj.adamc(sj.tabulate(lr_at, STEPS), weight_decay=decay, peak_lr=peak, steady_norm_sq=target)
        ours = run_jax(tx, dtype)

    def make(params: dict) -> torch.optim.Optimizer:
        return sn.AdamC(params.values(), lr=LR, weight_decay=0.5, steady_norm_sq=target)

    def move(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = lr_at(step)

    assert_alike(ours, run_torch(make, dtype, move), dtype)


@pytest.mark.parametrize("target", [None, 0.05])
def test_lionc_equals_torchs_lionc(target):
    """Its rows do not wait: all gradients are dense where Lion steps, as optax's does."""
    with jax.enable_x64(True):
        lr = sj.tabulate(lr_at, STEPS)
        tx = sj.lionc(lr, weight_decay=None if target else 1.0, peak_lr=None if target else LR, steady_norm_sq=target)
        ours = run_jax(tx, np.float64)

    def make(params: dict) -> torch.optim.Optimizer:
        return sn.LionC(params.values(), lr=LR, weight_decay=1.0, steady_norm_sq=target)

    def move(optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.param_groups[0]["lr"] = lr_at(step)

    assert_alike(ours, run_torch(make, np.float64, move), np.float64)


def test_muonc_equals_torchs_muonc():
    """Without Nesterov, because optax corrects its bias and torch does not; optax sees every matrix as d_in x d_out."""
    with jax.enable_x64(True):
        lr = sj.tabulate(lr_at, STEPS)
        tx = sj.muonc(
            lr, 0.5, nesterov=False, peak_lr=LR, adam_weight_decay=0.3, options={"eps": 1e-14, "adam_b2": 0.95}
        )
        ours = run_jax(tx, np.float64)

    def make(params: dict) -> torch.optim.Optimizer:
        groups = []
        for path, (shape, _, _) in TREE.items():
            if len(shape) == 2:
                view = "spectral" if path.endswith("kernel") else "spectral-transposed"
                groups.append({"params": [params[path]], "use_muon": True, "lmo": view})
            else:
                groups.append({"params": [params[path]], "use_muon": False, "weight_decay": 0.3, "eps": 1e-14})
        return sn.MuonC(groups, lr=LR, adam_lr=LR, weight_decay=0.5, nesterov=False, polar="newton-schulz")

    def move(optimizer: torch.optim.Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)

    assert_alike(ours, run_torch(make, np.float64, move), np.float64)
