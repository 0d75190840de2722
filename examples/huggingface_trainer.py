"""Train with ScionC in Hugging Face's Trainer, with its schedule, its checkpoints and our monitor.

pip install transformers accelerate
python examples/huggingface_trainer.py [steps] [folder]         then: steadynorm report FOLDER/monitor
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import steadynorm as sn
from steadynorm.integrations.huggingface import MonitorCallback
from steadynorm.lab.data.sotu import read_addresses
from steadynorm.records.sinks import to_folder

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
folder = sys.argv[2] if len(sys.argv) > 2 else "runs/huggingface_trainer"
torch.manual_seed(0)
config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
text = torch.frombuffer(
    bytearray("".join(address.text for address in read_addresses()[-40:]).encode()), dtype=torch.uint8
).long()
data = [{"input_ids": row, "labels": row} for row in text[: len(text) // 64 * 64].view(-1, 64)]

groups = sn.param_groups(model, lr=0.01)
print(sn.explain(groups))
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        warmup_steps=steps // 20,
        lr_scheduler_type="cosine",
        per_device_train_batch_size=16,
        logging_steps=max(1, steps // 4),
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=data,
    optimizers=(sn.ScionC(groups), None),  # None: the Trainer's own schedule
    callbacks=[MonitorCallback(to_folder(f"{folder}/monitor"))],
)
print(trainer.train().metrics)
