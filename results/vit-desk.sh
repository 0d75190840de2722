#!/usr/bin/env bash
# The desk ViT on CIFAR-10 with four optimizers, one core each; then what is kept of it.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
train=".venv/bin/steadynorm train vit"
adam="--task.model.variant adam --optim.lr 0.003 --optim.output-lr 0.003 --optim.weight-decay 2 --schedule.warmup 58 --clip 1"
$train --out runs/vit-desk/scion --name Scion --optim.name scion
$train --out runs/vit-desk/scionc --name ScionC
$train --out runs/vit-desk/adamw --name AdamW --optim.name adamw $adam
$train --out runs/vit-desk/adamc --name AdamC --optim.name adamc $adam
.venv/bin/python results/keep.py vit-desk "results/vit-desk.sh" runs/vit-desk/{adamw,adamc,scion,scionc}
