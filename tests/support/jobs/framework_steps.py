"""A small model trained by a framework's own loop: `framework_steps.py KIND OUT [CHECKPOINT]`.

KIND is hf, lightning, manual (Lightning with two optimizers of its own), accelerate or deepspeed. With a folder of
checkpoints the job saves there after two steps, or goes on from what lies there. What it ends with goes to OUT.
"""

import hashlib
import logging
import os
import sys
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import torch  # noqa: E402
from torch import nn  # noqa: E402

KIND, OUT = sys.argv[1:3]
CHECKPOINTS = sys.argv[3] if len(sys.argv) > 3 else None
STEPS = 4
losses = []


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def examples(count=32):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, generator=generator), torch.randn(2, generator=generator))
        for _ in range(count)
    ]


def hf():
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small()

        def forward(self, x, labels):
            loss = nn.functional.mse_loss(self.net(x), labels)
            losses.append(loss.item())
            return {"loss": loss}

    resumed = CHECKPOINTS is not None and os.path.isdir(f"{CHECKPOINTS}/checkpoint-2")
    arguments = TrainingArguments(
        output_dir=CHECKPOINTS or f"{OUT}.hf", max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
        save_strategy="steps" if CHECKPOINTS and not resumed else "no", save_steps=2, seed=3,
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in examples()]
    model = Model()
    Trainer(model, arguments, train_dataset=data).train(
        resume_from_checkpoint=f"{CHECKPOINTS}/checkpoint-2" if resumed else None
    )
    return model


def lightning():
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = small()
            self.automatic_optimization = KIND != "manual"

        def training_step(self, batch, _):
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            losses.append(loss.item())
            if self.automatic_optimization:
                return loss
            for one in self.optimizers():
                one.zero_grad()
            self.manual_backward(loss)
            for one in self.optimizers():
                one.step()
            return None

        def validation_step(self, batch, _):
            self.net(batch[0])

        def configure_optimizers(self):
            if self.automatic_optimization:
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            first, last = self.net[0], self.net[2]
            return [
                torch.optim.SGD(first.parameters(), lr=0.1),
                torch.optim.AdamW(last.parameters(), lr=0.01),
            ]

    L.seed_everything(1)
    saved = f"{CHECKPOINTS}/two.ckpt" if CHECKPOINTS else None
    resumed = saved is not None and os.path.exists(saved)
    options = dict(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=1, limit_val_batches=1,
    )  # fmt: skip
    if KIND != "manual":
        options |= dict(accumulate_grad_batches=2, gradient_clip_val=0.1)
    trainer = L.Trainer(max_steps=STEPS if resumed or not saved else 2, **options)
    loader = torch.utils.data.DataLoader(examples(), batch_size=2)
    model = Net()
    trainer.fit(model, loader, loader, ckpt_path=saved if resumed else None, weights_only=False)
    if saved and not resumed:
        trainer.save_checkpoint(saved)
    return model


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(examples(2 * 2 * STEPS), batch_size=2)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        with accelerator.accumulate(wrapped):
            loss = nn.functional.mse_loss(wrapped(x), y)
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return model


def deepspeed():
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()  # else it compiles some, for minutes
    place = f"file://{os.path.abspath(OUT)}.store"
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = small()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config=dict(
            train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2, zero_optimization=dict(stage=1),
            zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False,
        ),
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(examples(2 * 2 * STEPS), batch_size=2)
    for x, y in loader:
        loss = nn.functional.mse_loss(engine(x), y)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return model


jobs = dict(
    hf=hf, lightning=lightning, manual=lightning, accelerate=accelerate, deepspeed=deepspeed
)
trained = jobs[KIND]()
told = hashlib.sha256(repr(losses).encode())
for parameter in trained.parameters():
    told.update(parameter.detach().numpy().tobytes())
with open(OUT, "w") as file:
    file.write(told.hexdigest())
