"""The rows of trainers: what is installed, and the commands that their users give."""

from dataclasses import dataclass
from pathlib import Path

from trials.ecosystem.runs import SAME, Case, Program

SCRIPTS = Path(__file__).parent / "scripts"
STEPS, ACCUMULATION, RATE, RANKS = 4, 2, 1e-3, 2
LORA = ["q_proj", "v_proj"]
# Of elements: norms persist, as in models of their usual size, and weights are sharded.
SHARDED = {"stage3_param_persistence_threshold": 64}


@dataclass(frozen=True)
class Row:
    """An environment and the programs that run in it.

    Attributes:
        name: in the table, and on the command line.
        packages: requirements, the trainer's own first.
        programs: what is run.
        without: what the trainer asks for and a CPU does not need, by the beginning of the name.
        shown: packages whose releases the table says.
        repository: where programs are that no package has, as its address and tag.
        material: the file here that makes what they train on.
    """

    name: str
    packages: tuple[str, ...]
    programs: tuple[Program, ...]
    without: tuple[str, ...] = ()
    shown: tuple[str, ...] = ("deepspeed", "accelerate", "transformers")
    repository: tuple[str, str] | None = None
    material: str = "material.py"


def deepspeed(case: Case) -> str:
    """A DeepSpeed configuration as for the Hugging Face Trainer."""
    return case.write(
        "deepspeed.json",
        {
            "zero_optimization": {"stage": case.stage} | (SHARDED if case.stage == 3 else {}),
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zerosync": {},
        },
    )


def launch(case: Case) -> str:
    """A configuration of accelerate launch, with two ranks on a CPU."""
    return case.write(
        "launch.yaml",
        {
            "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "use_cpu": True, "gpu_ids": "",
            "num_machines": 1, "num_processes": 2, "machine_rank": 0, "main_process_port": 0,
            "main_training_function": "main",
            "deepspeed_config": {"deepspeed_config_file": deepspeed(case), "zero3_init_flag": case.stage == 3},
        },
    )  # fmt: skip


# A rank computes with its own part of the batch, or draws by its own numbers: one process would be another program.
RANKS_DIFFER = ("kto", "grpo")


def trl(method: str, data: str, model: str = "model", adapter: bool = False, **options: object) -> Program:
    def command(case: Case) -> list[str]:
        settings: dict[str, object] = {
            "model_name_or_path": str(case.material / model), "dataset_name": str(case.material / data),
            "output_dir": str(case.out), "max_steps": STEPS, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": ACCUMULATION, "learning_rate": RATE, "bf16": False,
            "dtype": "float32", "report_to": "none", "save_strategy": "no", "logging_steps": 1,
            **options,
        }  # fmt: skip
        if not case.stage and method not in RANKS_DIFFER:
            settings["per_device_train_batch_size"] = 4
        if not case.stage and method in RANKS_DIFFER:
            settings["use_cpu"] = True  # or Accelerate makes no process group
        if method == "grpo":
            settings["reward_model_name_or_path"] = str(case.material / "reward")
        if adapter:
            settings |= {"use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": LORA}
        file = case.write("training.yaml", settings)
        if not case.stage:
            ranks = 2 if method in RANKS_DIFFER else 1
            return ["torchrun", f"--nproc_per_node={ranks}", "-m", f"trl.scripts.{method}", "--config", file]
        return ["trl", method, "--config", file, "--accelerate_config", launch(case)]

    return Program(f"trl {method}{', LoRA' * adapter}", command)


def distillation() -> Program:
    def command(case: Case) -> list[str]:
        settings: dict[str, object] = {
            "model": case.material / "model", "conversations": case.material / "conversations",
            "teacher_model_name_or_path": case.material / "teacher", "output_dir": case.out, "max_steps": STEPS,
            "per_device_train_batch_size": 2, "gradient_accumulation_steps": ACCUMULATION, "learning_rate": RATE,
            "bf16": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "max_new_tokens": 8,
            "lmbda": 0.5,
        }  # fmt: skip
        settings |= {} if case.stage else {"use_cpu": True}
        given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        # Each rank generates from its own prompts, so one process would be another program.
        started = (
            ["accelerate", "launch", "--config_file", launch(case)]
            if case.stage
            else ["torchrun", "--nproc_per_node=2"]
        )
        return [*started, str(SCRIPTS / "distillation.py"), *given]

    return Program("accelerate launch distillation.py", command)


TRL = Row(
    "TRL",
    ("trl==1.16.0", "peft==0.21.2"),
    (
        trl("sft", "conversations"),
        trl("sft", "conversations", adapter=True),
        trl("dpo", "preferences"),
        trl("dpo", "preferences", adapter=True),
        trl("kto", "judged"),
        trl("reward", "preferences", "reward"),
        trl("grpo", "prompts", num_generations=2, max_completion_length=8, beta=0.1),
        distillation(),
    ),
    shown=("trl", "peft", "deepspeed", "accelerate", "transformers"),
)


def batch(case: Case) -> int:
    """The micro-batch of a rank: without DeepSpeed, one process takes that of all."""
    return 2 if case.stage else 2 * RANKS


def torchrun(case: Case, *variables: str) -> list[str]:
    """The variables that let a trainer start torchrun."""
    return list(variables) if case.stage else []


def llamafactory(method: str, adapter: bool = False, **options: object) -> Program:
    def command(case: Case) -> list[str]:
        columns = {"prompt": "instruction", "query": "input", "response": "output"}
        data = {"tiny": {"file_name": str(case.material / "instructions" / "train.jsonl"), "columns": columns}}
        case.write("dataset_info.json", data)
        settings: dict[str, object] = {
            "model_name_or_path": str(case.material / "model"), "stage": method, "do_train": True,
            "finetuning_type": "lora" if adapter else "full", "dataset_dir": str(case.folder), "dataset": "tiny",
            "template": "chatml", "cutoff_len": 128, "output_dir": str(case.out), "max_steps": STEPS,
            "per_device_train_batch_size": batch(case), "gradient_accumulation_steps": ACCUMULATION,
            "learning_rate": RATE,
            "report_to": "none", "logging_steps": 1, "preprocessing_num_workers": 1, "save_strategy": "no",
            **options,
        }  # fmt: skip
        if adapter:
            settings |= {"lora_rank": 4, "lora_target": ",".join(LORA)}
        if case.stage:
            settings["deepspeed"] = deepspeed(case)
        file = case.write("training.yaml", settings)
        return [*torchrun(case, "FORCE_TORCHRUN=1", f"NPROC_PER_NODE={RANKS}"), "llamafactory-cli", "train", file]

    chosen = "".join(f", {name}" for name in options)
    # It multiplies gradients in bf16, where their last bit counts for more: in fp32, it is 6e-08 and 4e-07.
    same = 0.05 if "use_muon" in options else SAME
    return Program(f"llamafactory-cli train, {method}{', LoRA' * adapter}{chosen}", command, same)


def swift(method: str, adapter: bool = False, **options: object) -> Program:
    def command(case: Case) -> list[str]:
        data = "rejected" if method == "rlhf" else "conversations"
        settings: dict[str, object] = {
            "model": case.material / "model", "model_type": "llama", "template": "chatml",
            "dataset": case.material / data / "train.jsonl", "tuner_type": "lora" if adapter else "full",
            "torch_dtype": "float32", "fp16": "false", "bf16": "false",
            "output_dir": case.out, "add_version": "false", "max_steps": STEPS,
            "per_device_train_batch_size": batch(case), "gradient_accumulation_steps": ACCUMULATION,
            "learning_rate": RATE,
            "logging_steps": 1, "save_strategy": "steps", "save_steps": STEPS, "report_to": "none",
            "dataloader_num_workers": 0, "max_length": 128, **options,
        }  # fmt: skip
        if adapter:
            settings |= {"lora_rank": 4, "lora_dropout": 0, "target_modules": " ".join(LORA)}
        if case.stage:
            settings["deepspeed"] = deepspeed(case)
        given = [word for name, value in settings.items() for word in (f"--{name}", *str(value).split(" "))]
        return [*torchrun(case, f"NPROC_PER_NODE={RANKS}"), "swift", method, *given]

    chosen = " ".join(f"--{name} {value}" for name, value in options.items())
    return Program(f"swift {method} {chosen}".rstrip() + ", LoRA" * adapter, command)


def axolotl(adapter: bool = False) -> Program:
    def command(case: Case) -> list[str]:
        # It averages over each rank's own tokens: one process is the same program where all answers are as long.
        rows = {"path": str(case.material / "even"), "type": "chat_template", "split": "train"}
        settings: dict[str, object] = {
            "base_model": str(case.material / "model"), "datasets": [rows],
            "dataset_prepared_path": str(case.folder / "data"),
            "output_dir": str(case.out), "sequence_len": 128, "max_steps": STEPS, "micro_batch_size": batch(case),
            "gradient_accumulation_steps": ACCUMULATION, "learning_rate": RATE, "optimizer": "adamw_torch",
            "lr_scheduler": "constant", "bf16": False, "fp16": False, "tf32": False, "flash_attention": False,
            "sdp_attention": True, "logging_steps": 1, "save_strategy": "no", "num_epochs": 1, "dataset_num_proc": 1,
            "save_safetensors": True, "seed": 42,
        }  # fmt: skip
        if adapter:
            settings |= {
                "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": LORA,
                "lora_model_dir": str(case.material / "adapter"),
            }  # fmt: skip
        if case.stage:
            # Of several ranks, each puts its model on the device of its number, unless its memory is limited.
            settings |= {"deepspeed": deepspeed(case), "max_memory": {"cpu": "8GiB"}}
        file = case.write("training.yaml", settings)
        ranks = RANKS if case.stage else 1
        return ["axolotl", "train", file, "--launcher", "torchrun", "--", f"--nproc_per_node={ranks}"]

    return Program(f"axolotl train{', LoRA' * adapter}", command)


def embeddings() -> Program:
    def command(case: Case) -> list[str]:
        settings: dict[str, object] = {
            "model": case.material / "model", "pairs": case.material / "instructions" / "train.jsonl",
            "output_dir": case.out, "max_steps": STEPS, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": ACCUMULATION, "learning_rate": RATE, "report_to": "none",
            "save_strategy": "no", "logging_steps": 1,
        }  # fmt: skip
        # Without DeepSpeed, Accelerate makes no process group on a CPU unless it is told to use it.
        settings |= {"deepspeed": deepspeed(case)} if case.stage else {"use_cpu": True}
        given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        # The loss looks at the pairs of a rank, so one process would be another program.
        return ["torchrun", f"--nproc_per_node={RANKS}", str(SCRIPTS / "embeddings.py"), *given]

    return Program("torchrun embeddings.py", command)


def peft(adapter: bool = False) -> Program:
    def command(case: Case) -> list[str]:
        settings: dict[str, object] = {
            "model_name_or_path": case.material / "model", "dataset_name": case.material / "conversations",
            "output_dir": case.out, "max_steps": STEPS, "per_device_train_batch_size": batch(case),
            "gradient_accumulation_steps": ACCUMULATION, "learning_rate": RATE, "max_length": 128, "bf16": False,
            "report_to": "none", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2,
            "save_strategy": "steps", "save_steps": 2,
        }  # fmt: skip
        if adapter:
            settings |= {"use_peft_lora": True, "lora_r": 4, "lora_dropout": 0, "lora_target_modules": ",".join(LORA)}
        given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        script = case.source("examples/sft/train.py")
        if not case.stage:
            return ["torchrun", "--nproc_per_node=1", script, *given]
        return ["accelerate", "launch", "--config_file", launch(case), script, *given]

    return Program(f"accelerate launch peft/examples/sft/train.py{', LoRA' * adapter}", command)


def diffusers(name: str) -> Program:
    def command(case: Case) -> list[str]:
        settings: dict[str, object] = {
            "pretrained_model_name_or_path": case.material / "pipeline", "train_data_dir": case.material / "images",
            "output_dir": case.out, "resolution": 32, "train_batch_size": 2, "max_train_steps": STEPS,
            "gradient_accumulation_steps": ACCUMULATION, "learning_rate": RATE, "seed": 1, "report_to": "all",
            "mixed_precision": "no", "checkpointing_steps": 1000,
        }  # fmt: skip
        given = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        script = case.source(f"examples/text_to_image/{name}")
        # Each rank draws its own noise, so one process would be another program.
        if not case.stage:
            return ["ACCELERATE_USE_CPU=true", "torchrun", f"--nproc_per_node={RANKS}", script, *given]
        return ["accelerate", "launch", "--config_file", launch(case), script, *given]

    return Program(f"accelerate launch diffusers/examples/text_to_image/{name}", command)


ROWS = [
    TRL,
    Row(
        "LLaMA-Factory",
        ("llamafactory==0.9.5", "deepspeed==0.18.4"),
        (
            llamafactory("sft"), llamafactory("sft", adapter=True), llamafactory("sft", use_muon=True),
        ),
        without=("gradio",),
        shown=("llamafactory", "peft", "deepspeed", "accelerate", "transformers"),
    ),
    Row(
        "ms-swift",
        ("ms-swift==4.6.0",),
        (
            swift("sft"), swift("sft", adapter=True),
            swift("rlhf", rlhf_type="dpo"), swift("rlhf", adapter=True, rlhf_type="dpo"),
        ),
        without=("attrdict", "oss2"),
        shown=("ms-swift", "peft", "deepspeed", "accelerate", "transformers"),
    ),
    Row(
        "axolotl",
        ("axolotl==0.19.0", "deepspeed==0.18.9"),
        (axolotl(), axolotl(adapter=True)),
        without=(
            "triton", "xformers", "flash-linear-attention", "fla-core", "torchao", "nvidia", "gradio",
            "modal", "s3fs", "gcsfs", "adlfs", "ocifs", "trackio", "openenv", "lm_eval",
        ),
        shown=("axolotl", "peft", "deepspeed", "accelerate", "transformers"),
    ),
    Row(
        "sentence-transformers",
        ("sentence-transformers==6.2.0", "datasets"),
        (embeddings(),),
        shown=("sentence-transformers", "deepspeed", "accelerate", "transformers"),
    ),
    Row(
        "PEFT",
        ("peft==0.20.0", "trl==1.16.0"),
        (peft(), peft(adapter=True)),
        shown=("peft", "trl", "deepspeed", "accelerate", "transformers"),
        repository=("https://github.com/huggingface/peft", "v0.20.0"),
    ),
    Row(
        "diffusers",
        ("diffusers==0.40.0", "peft", "torchvision", "datasets"),
        (diffusers("train_text_to_image.py"), diffusers("train_text_to_image_lora.py")),
        shown=("diffusers", "peft", "deepspeed", "accelerate", "transformers"),
        repository=("https://github.com/huggingface/diffusers", "v0.40.0"),
        material="pictures.py",
    ),
]  # fmt: skip
