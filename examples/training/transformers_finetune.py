"""Fine-tuning with transformers: its Trainer finds the other workers automatically.

usage: python examples/training/transformers_finetune.py
"""

from __future__ import annotations

import tempfile

import skyward as sky


def sentences(count: int) -> list[dict[str, list[int] | int]]:
    """Return sentences of made-up words, as numbers: words up to 49 occur in good reviews, the others in bad ones."""
    import random

    chance = random.Random(0)
    labels = [chance.randrange(2) for _ in range(count)]
    return [
        {"input_ids": [chance.randrange(50) + 50 * (label == 0) for _ in range(12)], "labels": label}
        for label in labels
    ]


@sky.compute
@sky.distributed.transformers()
def finetune(epochs: int) -> dict[str, float]:
    """Train a small model to separate good reviews from bad ones; return its metrics on others."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    set_seed(0)
    # A pretrained one: AutoModelForSequenceClassification.from_pretrained("google-bert/bert-base-uncased")
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = BertForSequenceClassification(config)

    reviews = sentences(512)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=16,  # times the number of workers
            learning_rate=2e-3,
            average_tokens_across_devices=False,  # the loss of this model is already a mean
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=reviews[:384],  # all rows: the Trainer divides them among the workers
            eval_dataset=reviews[384:],
            compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
        )
        trainer.train()
        return {"workers": arguments.world_size, "steps": trainer.state.global_step} | trainer.evaluate()


def main() -> None:
    image = sky.Image(pip=["torch", "transformers", "accelerate"])
    with sky.ComputePool(provider=sky.Local(), concurrency=2, image=image) as pool:
        outcomes = finetune(epochs=3) @ pool

    for rank, outcome in enumerate(outcomes):
        print(f"rank {rank} of {outcome['workers']}: {outcome['steps']} steps, accuracy {outcome['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
