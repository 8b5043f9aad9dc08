"""The rows of Lightning projects: what is installed, and the file here that trains a model of theirs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Project:
    """An environment and what runs in it.

    Attributes:
        name: in the table, and on the command line.
        packages: requirements, the project's own first.
        module: the file in this folder.
        without: what it asks for and does not need here, by the beginning of the name.
    """

    name: str
    packages: tuple[str, ...]
    module: str
    without: tuple[str, ...] = ()


ROWS = [
    Project("lightly", ("lightly==1.6.0", "torchvision"), "self_supervised"),
    Project("pytorch-forecasting", ("pytorch-forecasting==1.8.0",), "forecasting"),
    Project("pytorch-metric-learning", ("pytorch-metric-learning==2.9.0",), "metric_learning"),
    Project("torch-geometric", ("torch-geometric==2.8.1",), "graphs"),
    Project(
        "segmentation-models-pytorch", ("segmentation-models-pytorch==0.6.0", "torchvision"), "segmentation_models"
    ),
    Project("monai", ("monai==1.6.1",), "medical_images"),
    Project("kornia", ("kornia==0.9.0",), "differentiable_vision"),
    Project("chemprop", ("chemprop==2.3.1",), "molecules"),
    Project("gluonts", ("gluonts==0.17.0",), "estimators"),
]
