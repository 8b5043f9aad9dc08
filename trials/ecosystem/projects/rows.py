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
    Project(
        "pytorch-tabular",
        ("pytorch-tabular==1.2.0", "requests"),
        "tabular",
        without=("kaleido", "wandb", "tensorboard"),
    ),
    Project("torch-uncertainty", ("torch-uncertainty==0.13.0", "torchvision", "timm"), "uncertainty"),
    Project(
        "darts", ("darts==0.48.1",), "time_series", without=("statsforecast", "shap", "xgboost", "nfoursid", "pyod")
    ),
    Project("scvi-tools", ("scvi-tools==1.4.2",), "single_cells"),
    Project("asteroid", ("asteroid==0.7.0", "setuptools<81", "requests"), "speech_separation"),
    Project("torchgeo", ("torchgeo==0.8.1", "torchvision", "requests"), "satellite_images"),
    Project("lightning-uq-box", ("lightning-uq-box==0.2.0", "torchvision"), "quantified"),
    Project("pina-mathlab", ("pina-mathlab==0.3.2.post2610",), "equations"),
    Project(
        "litgpt", ("litgpt==0.5.13",), "language_models", without=("huggingface", "tokenizers", "torch", "lightning")
    ),
    Project("neuralforecast", ("neuralforecast==3.3.0",), "neural_forecasting"),
    Project("deeptab", ("deeptab==2.1.0",), "tables"),
]
