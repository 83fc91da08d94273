"""A small training under Lightning, which starts its ranks itself. `launched_lightning.py OUT STRATEGY`."""

import sys
import time

import lightning
import torch
from launched import leave


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 2)

    def training_step(self, batch, index):
        return self.net(batch[0]).square().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_end(self):
        leave(sys.argv[1], self.global_rank, self.net)
        time.sleep(0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    lightning.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(16, 6))
    trainer = lightning.Trainer(
        strategy=sys.argv[2],
        devices=2,
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4))
