"""What trainers train on, made without a network: python material.py FOLDER, in the environment of a row.

model/            a Llama of two layers with random weights, and its tokenizer
reward/           the same with one output, for reward models
teacher/          the same with other weights
adapter/          LoRA that adds nothing, if there is PEFT, for trainers that draw their own before they take a seed
NAME/train.jsonl  conversations, preferences, judged answers and prompts, of unequal lengths, but for the answers of
                  "even"; conversations have test.jsonl, too
"""

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

WORDS = [
    "a",
    "gradient",
    "is",
    "summed",
    "over",
    "ranks",
    "once",
    "and",
    "then",
    "each",
    "shard",
    "takes",
    "its",
    "own",
    "step",
    "while",
    "the",
    "rest",
    "of",
    "it",
    "waits",
    "for",
    "no",
    "one",
    "because",
    "every",
    "window",
    "closes",
    "where",
    "the",
    "program",
    "says",
    "so",
    "and",
    "not",
    "before",
    "or",
    "after",
    "that",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = 96


def make(folder: Path) -> None:
    numbers = random.Random(0)

    def sentence() -> str:
        return " ".join(numbers.choices(WORDS, k=numbers.randint(3, 12)))

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer([sentence() for _ in range(500)])
    kinds: tuple[tuple[str, Any, dict[str, int]], ...] = (
        ("model", LlamaForCausalLM, {}),
        ("reward", LlamaForSequenceClassification, {"num_labels": 1}),  # which says to ms-swift what a model is for
        ("teacher", LlamaForCausalLM, {}),
    )
    for name, cls, outputs in kinds:
        torch.manual_seed(name == "teacher")
        model = cls(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
                bos_token_id=1, eos_token_id=5, pad_token_id=3, **outputs,
            )
        )  # fmt: skip
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    if importlib.util.find_spec("peft"):
        make_adapter(folder)
    pairs = [(sentence(), sentence(), sentence()) for _ in range(ROWS)]
    asked = [[{"role": "user", "content": question}] for question, _, _ in pairs]
    good = [[{"role": "assistant", "content": answer}] for _, answer, _ in pairs]
    bad = [[{"role": "assistant", "content": answer}] for _, _, answer in pairs]
    everything = list(zip(asked, good, bad, strict=True))
    conversations = [{"messages": a + g} for a, g, _ in everything]
    write(folder / "conversations", conversations)
    write(folder / "conversations", conversations[:8], "test")
    write(folder / "preferences", [{"prompt": a, "chosen": g, "rejected": b} for a, g, b in everything])
    rejected = [{"messages": a + g, "rejected_response": b[0]["content"]} for a, g, b in everything]
    write(folder / "rejected", rejected)  # preferences as ms-swift reads them
    judged = [{"prompt": a, "completion": (g, b)[n % 2], "label": n % 2 == 0} for n, (a, g, b) in enumerate(everything)]
    write(folder / "judged", judged)
    write(folder / "prompts", [{"prompt": a} for a in asked])
    even = (answer for answer in iter(sentence, None) if len(tokenizer(answer).input_ids) == 10)
    answers = [[{"role": "assistant", "content": next(even)}] for _ in pairs]
    write(folder / "even", [{"messages": a + g} for a, g in zip(asked, answers, strict=True)])
    write(folder / "instructions", [{"instruction": q, "input": "", "output": a} for q, a, _ in pairs])


def make_adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = LlamaForCausalLM.from_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(folder / "adapter")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"], model_max_length=256, chat_template=CHAT,
    )  # fmt: skip


def write(folder: Path, rows: list[dict[str, object]], split: str = "train") -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
