"""Lightning's own command line: lightning_cli.py fit --config settings.yaml --model.lr 0.1."""

import lightning as L
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, Subset
from train_lightning import Classifier

from lab_utils import data


class Images(L.LightningDataModule):
    """The data: Lightning asks it for its loaders."""

    def __init__(self, name: str | None = None, images: int = 640, batch_size: int = 64):
        super().__init__()
        self.name, self.images, self.batch_size = name, images, batch_size

    def setup(self, stage):
        """Every rank calls this."""
        dataset = data.load(self.name)
        self.train, self.valid = (Subset(split, range(self.images)) for split in (dataset.train, dataset.valid))

    def train_dataloader(self):
        """The train split, in another order each epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        """The valid split."""
        return DataLoader(self.valid, self.batch_size)


if __name__ == "__main__":
    # By default it keeps the settings of each run, as config.yaml.
    LightningCLI(Classifier, Images, seed_everything_default=0, save_config_callback=None)
