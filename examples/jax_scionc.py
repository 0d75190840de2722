"""Train with ScionC in JAX: warmup and cosine, one rule per kind of layer, and a hidden norm that stays.

python examples/jax_scionc.py [steps]        (pip install -e '.[jax]'; torch is not imported)
"""

import sys

import jax
import jax.numpy as jnp
import optax

import steadynorm.jax as sj

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
PEAK = 0.02
schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK, steps // 10, steps, PEAK / 100)


def init(key: jax.Array) -> dict:
    """Return the weights of a small network, stored d_in x d_out as in flax."""
    sizes = {"Dense_0": (32, 128), "Dense_1": (128, 128), "head": (128, 10)}
    keys = jax.random.split(key, len(sizes))
    return {
        name: {"kernel": jax.random.normal(k, shape) / shape[0] ** 0.5, "bias": jnp.zeros(shape[1])}
        for k, (name, shape) in zip(keys, sizes.items(), strict=True)
    }


def loss_of(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    for name in ("Dense_0", "Dense_1"):
        x = jax.nn.gelu(x @ params[name]["kernel"] + params[name]["bias"])
    logits = x @ params["head"]["kernel"] + params["head"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


start, teacher_key, data_key = jax.random.split(jax.random.key(0), 3)
params, teacher = init(start), jax.random.normal(teacher_key, (32, 10))
labels = sj.label_params(params)
print(sj.explain(labels))
tx = sj.scionc(schedule, labels, alpha=0.1, steady_norm_sq=1.1875, peak_lr=PEAK)
state = tx.init(params)


@jax.jit
def train_step(params: dict, state: sj.ScionState, key: jax.Array) -> tuple[dict, sj.ScionState, jax.Array]:
    x_key, noise_key = jax.random.split(key)
    x = jax.random.normal(x_key, (64, 32))
    y = (x @ teacher + jax.random.normal(noise_key, (64, 10))).argmax(-1)
    loss, grads = jax.value_and_grad(loss_of)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


for step, key in enumerate(jax.random.split(data_key, steps)):
    params, state, loss = train_step(params, state, key)
    if (step + 1) % max(1, steps // 8) == 0:
        norm = jnp.linalg.norm(params["Dense_1"]["kernel"])
        print(f"step {step + 1:>4}  lr {schedule(step):.4f}  loss {loss:.3f}  norm of Dense_1 {norm:.2f}")
