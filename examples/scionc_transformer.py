"""Train a small transformer on bytes with ScionC, a schedule, a monitor and a report.

python examples/scionc_transformer.py [steps] [folder]         then: steadynorm report FOLDER
"""

import sys

import torch
from torch import nn

import steadynorm as sn
from steadynorm.lab.data.sotu import read_addresses
from steadynorm.records.sinks import to_folder

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
folder = sys.argv[2] if len(sys.argv) > 2 else "runs/scionc_transformer"
text = torch.frombuffer(
    bytearray("".join(address.text for address in read_addresses()[-40:]).encode()), dtype=torch.uint8
).long()
COLUMNS = ("loss", "weight_norm/hidden", "forecast_norm/hidden")


class Transformer(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, context: int = 64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, length) -> (batch, length, 256)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.head(self.blocks(h, mask=mask, is_causal=True))


torch.manual_seed(0)
model = Transformer()
groups = sn.param_groups(model, lr=0.01, output="head")
print(sn.explain(groups))  # which parameter gets which rule, and why
optimizer = sn.ScionC(groups)
scheduler = sn.Scheduler(optimizer, scale={"lr": sn.schedule.cosine(steps, warmup=steps // 20)})
monitor, write = sn.Monitor(optimizer, model), to_folder(folder)

for step in range(1, steps + 1):
    start = torch.randint(len(text) - 65, (16, 1))
    sample = text[start + torch.arange(65)]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
    loss.backward()
    monitor.log(loss=loss)
    optimizer.step()
    scheduler.step()
    if step % 50 == 0 or step == steps:
        records = monitor.measure()  # one transfer from the device
        write(records)
        last = records[-1]
        print(f"step {step}: " + "  ".join(f"{key} {last[key]:.3f}" for key in COLUMNS))
