"""Thin pieces for other people's trainers; each module imports its library when you import it, and only then.

| module | what it has |
|---|---|
| `huggingface` | `MonitorCallback` for `transformers.Trainer` |
| `lightning` | `MonitorCallback` for Lightning's `Trainer` |
| `timm` | `register()`: our optimizers in timm's `create_optimizer_v2` |
| `sinks` | where records go: `to_tensorboard`, `to_wandb`, `to_folder` |
"""
