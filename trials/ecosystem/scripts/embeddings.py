"""A script as sentence-transformers' users write them: SentenceTransformerTrainer, with all arguments of its own.

torchrun --nproc_per_node 2 embeddings.py --model MODEL --pairs FILE --output_dir FOLDER [--deepspeed FILE] ...
"""

from dataclasses import dataclass

from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import HfArgumentParser


@dataclass
class Paths:
    model: str
    pairs: str


if __name__ == "__main__":
    paths, arguments = HfArgumentParser((Paths, SentenceTransformerTrainingArguments)).parse_args_into_dataclasses()
    transformer = Transformer(paths.model)
    model = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())])
    rows = load_dataset("json", data_files=paths.pairs, split="train").select_columns(["instruction", "output"])
    trainer = SentenceTransformerTrainer(model, arguments, rows, loss=MultipleNegativesRankingLoss(model))
    trainer.train()
    trainer.save_model()
