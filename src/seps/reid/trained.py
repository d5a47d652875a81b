"""A trained model with what it was trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from seps.method.config import ConfigError
from seps.reid.config import ReidConfig
from seps.reid.data import ReidDataset
from seps.reid.network.model import ReidModel


@dataclass(frozen=True)
class TrainedReid:
    """A trained model, the settings and cameras it was trained with, and the checkpoint it came from.

    `shots` is `shots_digest` of the set it was trained on; None where that is not known.
    """

    model: ReidModel
    config: ReidConfig
    cameras: tuple[int, ...]
    checkpoint: Path
    shots: str | None = None

    def check(self, dataset: ReidDataset) -> None:
        """Raise ValueError when the model cannot be used on this data set."""
        if dataset.modalities != self.model.modalities:
            raise ConfigError(
                f"The model was trained on {self.model.modalities}, the data set has {dataset.modalities}: set "
                "data.modalities to those of the model, in that order."
            )
        if self.config.model.camera_embedding and dataset.cameras != self.cameras:
            raise ConfigError(
                f"The model has an embedding of the cameras {self.cameras}, the data set has {dataset.cameras}: train "
                "with model.camera_embedding=false to use it on other cameras."
            )
