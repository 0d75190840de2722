"""Train under FSDP2: parameters, gradients and momentum are sharded, and the optimizer needs no option for it.

torchrun --nproc-per-node 2 examples/fsdp2.py [steps]         (gloo on CPUs, NCCL on GPUs)
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import steadynorm as sn

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same weights on every process
model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
mesh = init_device_mesh(device, (world,))
for layer in (model[0], model[2], model[4]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

optimizer = sn.ScionC(sn.param_groups(model, lr=0.01, output="4"))  # DTensors are recognised
scheduler = sn.Scheduler(optimizer, scale={"lr": sn.schedule.cosine(steps)})
monitor = sn.Monitor(optimizer, model)  # create it on every process; it sums over the shards

torch.manual_seed(rank)  # different data on each process
for _ in range(steps):
    x = torch.randn(64, 32, device=device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
    loss.backward()
    optimizer.step()
    scheduler.step()
last = monitor.measure()[-1]
shard = optimizer.state[model[2].weight]["momentum_buffer"].to_local()
for turn in range(world):
    dist.barrier()
    if turn == rank:
        print(
            f"rank {rank}: loss {loss.item():.3f}  weight norm {last['weight_norm']:.3f}  momentum {tuple(shard.shape)}"
        )
dist.destroy_process_group()
