"""A script as TRL's users write them: GKDTrainer, which generates in its steps and asks a teacher, another engine.

accelerate launch distillation.py --model MODEL --conversations FOLDER --teacher_model_name_or_path MODEL ...
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoTokenizer, HfArgumentParser
from trl.experimental.gkd import GKDConfig, GKDTrainer


@dataclass
class Paths:
    model: str
    conversations: str


if __name__ == "__main__":
    paths, arguments = HfArgumentParser((Paths, GKDConfig)).parse_args_into_dataclasses()
    arguments.model_init_kwargs = arguments.teacher_model_init_kwargs = {"dtype": "float32"}
    trainer = GKDTrainer(
        model=paths.model, teacher_model=arguments.teacher_model_name_or_path, args=arguments,
        train_dataset=load_dataset(paths.conversations, split="train"),
        processing_class=AutoTokenizer.from_pretrained(paths.model),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
