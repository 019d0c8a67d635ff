"""Federated LoRA as functions of tensors: from the adapters that workers trained to one adapter, one rule per file."""
