"""PINA: a network that learns the solution of Poisson's equation, by its PINN solver and Trainer."""

from typing import Any, ClassVar

import torch
from pina import Condition, Trainer
from pina.domain import CartesianDomain
from pina.equation import Equation, FixedValue
from pina.model import FeedForward
from pina.operator import laplacian
from pina.problem import SpatialProblem
from pina.solver import PINN

PLAIN = "ddp_find_unused_parameters_true"
OPTIONS = {"param_memory_budget": "all"}  # the equation's derivatives need the parameters after the forward


class Poisson(SpatialProblem):
    output_variables: ClassVar[Any] = ["u"]
    spatial_domain = CartesianDomain({"x": [0, 1], "y": [0, 1]})
    domains: ClassVar[Any] = {"inside": spatial_domain, "below": CartesianDomain({"x": [0, 1], "y": 0})}
    conditions: ClassVar[Any] = {
        "inside": Condition(domain="inside", equation=Equation(lambda x, u: laplacian(u, x) + torch.sin(x["x"] * 3))),
        "below": Condition(domain="below", equation=FixedValue(0.0)),
    }


def fit(options: dict[str, Any]) -> None:
    problem = Poisson()
    problem.discretise_domain(64, "random", domains=["inside", "below"])
    net = FeedForward(input_dimensions=2, output_dimensions=1, layers=[16, 16])
    Trainer(PINN(problem, net), batch_size=4, train_size=1.0, val_size=0.0, test_size=0.0, **options).train()
