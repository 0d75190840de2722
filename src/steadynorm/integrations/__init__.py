"""Adapters for other people's trainers; each module imports its library only when you import the module.

| module | contents |
|---|---|
| `huggingface` | `MonitorCallback` for `transformers.Trainer` |
| `lightning` | `MonitorCallback` for Lightning's `Trainer` |
| `timm` | `register()`: our optimizers in timm's `create_optimizer_v2` |

`steadynorm.records.sinks` has the sinks that records go to: `to_tensorboard`, `to_wandb`, `to_folder`.
"""
