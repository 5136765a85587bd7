"""Parts of the fake GPUs of ``support.gpus``."""
