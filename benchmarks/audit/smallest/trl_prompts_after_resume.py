"""TRL's GRPOTrainer takes the first epoch's order again where it is resumed in the second one.

    pip install trl==1.16.0
    python trl_prompts_after_resume.py

Eight prompts, one for each update, two epochs; and the same run again from its checkpoint 8, where the
second epoch begins.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

words = ["<pad>", "<eos>", *"abcdefgh"]
backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}))
backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
rows = [{"prompt": letter} for letter in "abcdefgh"]


def train(folder: str, resume: str | None = None) -> str:
    """The prompts of a run, in the order in which they come."""
    seen = []

    def reward(prompts, completions, **_) -> list[float]:
        seen.append(prompts[0])
        return [float(len(completion)) for completion in completions]

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **sizes)),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=2,
            num_train_epochs=2,
            logging_steps=1,
            save_steps=8,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=resume)
    return " ".join(seen)


with tempfile.TemporaryDirectory() as folder:
    unbroken = train(folder)
    resumed = train(folder, f"{folder}/checkpoint-8")
print(f"first epoch:                    {unbroken[:15]}")
print(f"second epoch, never stopped:    {unbroken[16:]}")
print(f"second epoch, resumed:          {resumed}")
