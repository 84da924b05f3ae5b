"""LoRA adapters in folders of PEFT: their configuration, their weights, and base weights with an adapter merged into them."""
