"""The Trainer of transformers on a tiny model: hugging_trainer.py FOLDER STEPS [dies=N] [resumes].

It saves every fifth step, `dies` by SIGKILL when step N begins, and `resumes` from the last checkpoint.
"""

import os
import signal
import sys

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

torch.set_num_threads(1)
folder, steps = sys.argv[1], int(sys.argv[2])
dies = next((int(word[5:]) for word in sys.argv if word.startswith("dies=")), -1)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(self, x, labels=None):
        out = self.layers(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Dies(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == dies:
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
data = [
    {"x": torch.randn(4, generator=generator), "labels": torch.randn(1, generator=generator)}
    for _ in range(64)
]
arguments = TrainingArguments(
    folder,
    max_steps=steps,
    save_steps=5,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    seed=7,
)
trainer = Trainer(model=Net(), args=arguments, train_dataset=data, callbacks=[Dies()])
trainer.train(resume_from_checkpoint="resumes" in sys.argv)
