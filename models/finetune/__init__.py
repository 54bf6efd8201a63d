"""Fine-tuning of a language model: `python -m models.finetune`."""
